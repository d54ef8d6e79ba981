"""Make the database ready, in a process of its own: schema and tokens. What it imports is gone with it.

    python -m leasehold.local_stack.prepare DATA_DIRECTORY PATIENCE_S

It is started together with Postgres, so it waits for an answer. What went wrong is the last line that it writes.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from os import environ
from pathlib import Path

import asyncpg

from coordinator.operations.issue_token import issue_token
from leasehold.local_stack.plan import URL_VARIABLE
from migrations.run import upgrade

AGAIN_AFTER_S = 0.02
CONNECT_TIMEOUT_S = 5


async def find_database(url: str, patience_s: float) -> None:
    """Wait until Postgres answers, and make the database if it is not there."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            await _make_sure_of(url)
        except (OSError, TimeoutError, asyncpg.CannotConnectNowError, asyncpg.PostgresConnectionError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(AGAIN_AFTER_S)
        else:
            return


async def _make_sure_of(url: str) -> None:
    try:
        await _execute(url, "SELECT")
    except asyncpg.InvalidCatalogNameError:
        server, _, database = url.partition("?")[0].rpartition("/")
        await _execute(f"{server}/postgres", 'CREATE DATABASE "{}"'.format(database.replace('"', '""')))


async def _execute(url: str, sql: str) -> None:
    connection = await asyncpg.connect(url, timeout=CONNECT_TIMEOUT_S)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


async def issue_tokens(url: str, tokens: Mapping[str, str]) -> None:
    """Each token is good for one scope. They are the same at every start, so most starts find them there."""
    connection = await asyncpg.connect(url, timeout=CONNECT_TIMEOUT_S)
    try:
        async with connection.transaction():
            for scope, token in tokens.items():
                await issue_token(connection, [scope], "leasehold up", datetime.now(UTC), token)
    finally:
        await connection.close()


def main(data: Path, patience_s: float) -> None:
    url = environ[URL_VARIABLE]
    asyncio.run(find_database(url, patience_s))
    upgrade(url)
    asyncio.run(issue_tokens(url, json.loads((data / "secrets.json").read_text())["tokens"]))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), float(sys.argv[2]))
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
        sys.exit(f"{str(error) or type(error).__name__}")
