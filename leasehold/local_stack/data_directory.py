"""The directory that outlives a run: servers' data, secrets, logs, and the running processes.

format        the version of this layout; a directory without it is not ours, and is never touched
lock          held by the launcher that uses the directory; the kernel releases it when that launcher ends
secrets.json  passwords and tokens (0600), made once and used by every later start
running.json  each process with its pid and start time, so that those of a killed launcher can be found and stopped
stack.json    addresses and tokens for other programs (0600), present while the stack is ready
postgres/ stores/ agents/ logs/
"""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from leasehold.local_stack.plan import REGIONS
from leasehold.local_stack.processes import Identity

FORMAT = "leasehold local stack, format 2"
SCOPES = (
    *(f"region:{region}" for region in REGIONS),
    *("quota:read", "quota:write", "tenant:write", "alloc:write", "usage:read"),
    *("adjust:propose", "adjust:approve", "period:close", "audit:read", "admin"),
)


class CannotStart(Exception):
    """The stack cannot be started; the message is one sentence."""


class Secrets(NamedTuple):
    postgres: str
    coordinator: str  # the password of its Postgres user
    stores: dict[str, str]
    tokens: dict[str, str]


class DataDirectory:
    """The directory while this launcher holds its lock."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.postgres = path / "postgres"
        self.stack_file = path / "stack.json"
        self._running_file = path / "running.json"
        self._secrets_file = path / "secrets.json"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def new_log(self, name: str) -> Path:
        """Return a new log. The log of the last run is kept beside it, and older ones are deleted."""
        log = self.log(name)
        if log.exists():
            log.replace(log.with_name(f"{log.name}.1"))
        return log

    def store(self, region: str) -> Path:
        return self.path / "stores" / region

    def agent(self, region: str) -> Path:
        return self.path / "agents" / region

    def release(self) -> None:
        os.close(self._lock)

    def empty(self) -> None:
        """Delete everything but the lock, and the format last: without it the directory would not be ours any more."""
        for name in sorted(os.listdir(self.path), key=lambda name: name == "format"):
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif name != "lock":
                path.unlink()

    def prepare(self) -> None:
        """Refuse data of another version, and make the directories that do not exist yet."""
        format_file = self.path / "format"
        found = format_file.read_text().strip() if format_file.exists() else FORMAT
        if found != FORMAT:
            raise CannotStart(
                f"{self.path} holds the data of another version of Leasehold ({found[:80]!r}; this one reads "
                f"{FORMAT!r}): choose another directory with --data, or delete what is in it with --fresh"
            )
        format_file.write_text(f"{FORMAT}\n")
        for path in (self.path / "logs", *map(self.store, REGIONS), *map(self.agent, REGIONS)):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def secrets(self) -> Secrets:
        if not self._secrets_file.exists():
            if self.postgres.exists():
                raise CannotStart(f"{self._secrets_file} with the passwords is missing: start with --fresh")
            write_private(self._secrets_file, _new_secrets()._asdict())
        return Secrets(**json.loads(self._secrets_file.read_text()))

    def record_running(self, running: Mapping[str, Identity]) -> None:
        write_private(self._running_file, running)

    def left_running(self) -> dict[str, Identity]:
        """Return the processes that a killed launcher left. They may have exited since."""
        if not self._running_file.exists():
            return {}
        with suppress(ValueError, TypeError, AttributeError):
            return {name: Identity(*who) for name, who in json.loads(self._running_file.read_text()).items()}
        return {}

    def forget(self) -> None:
        self.stack_file.unlink(missing_ok=True)
        self._running_file.unlink(missing_ok=True)


def open_data_directory(path: Path) -> DataDirectory:
    """Lock the directory for this launcher, or raise CannotStart."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_foreign(path, os.listdir(path))
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise CannotStart(f"cannot use {path} ({error.strerror}): choose another directory with --data") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 20).decode(errors="replace").strip()
        os.close(lock)
        raise CannotStart(f"another `leasehold up` (pid {holder}) is running on {path}") from None
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return DataDirectory(path, lock)


def _refuse_foreign(path: Path, names: Iterable[str]) -> None:
    if "format" not in names and set(names) - {"lock"}:
        raise CannotStart(f"{path} is not empty, and is not a data directory of Leasehold: choose another with --data")


def _new_secrets() -> Secrets:
    # The same shape as in web.tokens, whose import the launcher does not need otherwise.
    tokens = {scope: f"lh_{secrets.token_urlsafe(32)}" for scope in SCOPES}
    owner, coordinator = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    return Secrets(owner, coordinator, {region: secrets.token_urlsafe(24) for region in REGIONS}, tokens)


def write_private(path: Path, value: Any) -> None:
    """Write a file atomically that other users cannot read at any moment."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
    unfinished.replace(path)
