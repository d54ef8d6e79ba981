"""Prepare the database in a process of its own: schema and tokens. Its imports need no memory afterwards.

    python -m leasehold.local_stack.prepare DATA_DIRECTORY TIMEOUT_S

It is started together with Postgres, so it waits for an answer. If it fails, the last line of its log has the reason.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from os import environ
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from coordinator.access.issue_token import issue_token
from coordinator.health.readiness import schema_revision
from leasehold.local_stack.plan import COORDINATOR_URL_VARIABLE, URL_VARIABLE
from migrations.connect import connect
from migrations.revisions import is_behind

RETRY_S = 0.02
CONNECT_TIMEOUT_S = 5


async def find_database(url: str, timeout_s: float, coordinator_url: str | None = None) -> bool:
    """Wait until Postgres answers, and create the database if it does not exist. Return whether it is up to date.

    It is if its schema is, and if the coordinator's user exists.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await _is_up_to_date(url, coordinator_url)
        except (OSError, TimeoutError, asyncpg.CannotConnectNowError, asyncpg.PostgresConnectionError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(RETRY_S)


async def _is_up_to_date(url: str, coordinator_url: str | None) -> bool:
    try:
        connection = await connect(url, timeout_s=CONNECT_TIMEOUT_S)
    except asyncpg.InvalidCatalogNameError:
        await _create(url)
        return False
    try:
        if coordinator_url and not await connection.fetchval(_IS_KNOWN, urlsplit(coordinator_url).username):
            return False
        return not is_behind(await schema_revision(connection))
    finally:
        await connection.close()


_IS_KNOWN = "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)"


async def _create(url: str) -> None:
    server, _, database = url.partition("?")[0].rpartition("/")
    connection = await connect(f"{server}/postgres", timeout_s=CONNECT_TIMEOUT_S)
    try:
        await connection.execute('CREATE DATABASE "{}"'.format(database.replace('"', '""')))
    finally:
        await connection.close()


async def issue_tokens(url: str, tokens: Mapping[str, str]) -> None:
    """Create a token for each scope. They are the same at every start, so most starts find them there."""
    connection = await connect(url, timeout_s=CONNECT_TIMEOUT_S)
    try:
        async with connection.transaction():
            for scope, token in tokens.items():
                await issue_token(connection, [scope], "leasehold up", datetime.now(UTC), token)
    finally:
        await connection.close()


def _import_migrations() -> Callable[[str, str | None], bool]:
    from migrations.run import upgrade  # noqa: PLC0415 - most starts find an up-to-date schema and do not need it

    return upgrade


def main(data: Path, timeout_s: float) -> None:
    url, coordinator_url = environ[URL_VARIABLE], environ.get(COORDINATOR_URL_VARIABLE)
    if not (data / "postgres").exists():
        _import_migrations()  # it will be needed, and takes about as long as making the cluster, which runs meanwhile
    if not asyncio.run(find_database(url, timeout_s, coordinator_url)):
        _import_migrations()(url, coordinator_url)
    asyncio.run(issue_tokens(url, json.loads((data / "secrets.json").read_text())["tokens"]))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), float(sys.argv[2]))
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
        sys.exit(f"{str(error) or type(error).__name__}")
