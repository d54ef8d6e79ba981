"""A primary and a standby of Postgres that can take over from each other."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg

from leasehold.local_stack import embedded
from leasehold.local_stack.processes import wait_until
from tests.chaos.pieces import PATIENCE_S, Piece

STANDBY = "standby"
_RECEIVING = "SELECT count(*) FROM pg_stat_wal_receiver"
_STREAMING = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"


class Pair:
    """Two servers; `pieces` has the primary first."""

    def __init__(self, directory: Path, ports: tuple[int, int], password: str, log_of: Callable[[str], Path]) -> None:
        self._password, self._ports = password, ports
        self._directories = {port: directory / f"postgres-{port}" for port in ports}
        self._log_of = log_of
        self.pieces = [self._piece(port) for port in ports]

    def _piece(self, port: int) -> Piece:
        data, name = self._directories[port], f"postgres-{port}"

        def start() -> "subprocess.Popen[bytes]":
            return embedded.start_postgres(data, port, log=self._log_of(name))

        return Piece(name, start, lambda: embedded.postgres_is_ready(data))

    @property
    def primary(self) -> Piece:
        return self.pieces[0]

    @property
    def standby(self) -> Piece:
        return self.pieces[1]

    @property
    def data(self) -> Path:
        """Return the primary's directory."""
        return self._data(self.primary)

    def database_url(self, database: str) -> str:
        return embedded.postgres_url(self._port(self.primary), self._password, database)

    def url_of_both(self, database: str) -> str:
        """Return the URL at which a coordinator finds whichever of the two is the primary."""
        hosts = ",".join(f"{embedded.LOOPBACK}:{port}" for port in self._ports)
        url = embedded.postgres_url(self._ports[0], self._password, database)
        return url.replace(f"{embedded.LOOPBACK}:{self._ports[0]}", hosts) + "&target_session_attrs=read-write"

    def add_standby(self, *, is_synchronous: bool) -> None:
        """Copy the primary, start the copy as its standby, and wait until it streams."""
        if self.standby.process is not None:
            self.standby.kill()
        data = self._data(self.standby)
        shutil.rmtree(data, ignore_errors=True)
        source = (
            f"host={embedded.LOOPBACK} port={self._port(self.primary)} user={embedded.OWNER} application_name={STANDBY}"
        )
        command = [embedded.postgres_binary("pg_basebackup"), "-D", data, "-R", "-c", "fast", "--no-sync", "-d", source]
        environ = os.environ | {"PGPASSWORD": self._password}
        subprocess.run(list(map(str, command)), check=True, capture_output=True, env=environ)
        self.standby.begin()
        self.standby.wait()
        assert wait_until(lambda: self._ask(self.primary, _STREAMING) == 1, PATIENCE_S)
        self.wait_for_standby(is_synchronous)

    def wait_for_standby(self, is_synchronous: bool) -> None:
        """Let each commit wait for the standby, or none."""
        self._alter(f"SET synchronous_standby_names = '{STANDBY if is_synchronous else ''}'")

    def leave_behind(self) -> None:
        """Let the standby receive nothing any more: a commit of the primary is lost if the standby is promoted."""
        self.wait_for_standby(False)
        self._alter("SET primary_conninfo = ''", self.standby)
        assert wait_until(lambda: self._ask(self.standby, _RECEIVING) == 0, PATIENCE_S)

    def promote(self) -> None:
        """Make the standby the primary. It waits for no standby, because it has none yet."""
        self.pieces.reverse()
        assert self._ask(self.primary, "SELECT pg_promote()") is True
        self.wait_for_standby(False)

    def _alter(self, change: str, server: Piece | None = None) -> None:
        self._ask(server or self.primary, f"ALTER SYSTEM {change}")
        self._ask(server or self.primary, "SELECT pg_reload_conf()")

    def _ask(self, piece: Piece, sql: str) -> Any:
        return asyncio.run(self._fetch(self._port(piece), sql))

    async def _fetch(self, port: int, sql: str) -> Any:
        connection = await asyncpg.connect(embedded.postgres_url(port, self._password))
        try:
            await connection.execute("SET synchronous_commit = off")  # it shall not wait for a standby that is gone
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    def _port(self, piece: Piece) -> int:
        return int(piece.name.rpartition("-")[2])

    def _data(self, piece: Piece) -> Path:
        return self._directories[self._port(piece)]
