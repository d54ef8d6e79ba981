"""The directory that outlives a run: servers' data, secrets, logs, and who is running.

format        which version of this layout it is; a directory without it is not ours, and is never touched
lock          held by the launcher that uses the directory; the kernel lets go of it when that launcher ends
secrets.json  passwords and tokens (0600); made once, so that a second start knows them again
running.json  each process with pid and moment of start, so that a killed launcher's can be found and ended
stack.json    for other programs: where everything is, and the tokens (0600); there while the stack is ready
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

FORMAT = "leasehold local stack, format 1"
SCOPES = (
    *(f"region:{region}" for region in REGIONS),
    *("quota:read", "quota:write", "alloc:write", "usage:read"),
    *("adjust:propose", "adjust:approve", "period:close", "audit:read", "admin"),
)


class CannotStart(Exception):
    """Why the stack cannot be started, in one sentence."""


class Secrets(NamedTuple):
    postgres: str
    coordinator: str  # of the user that it logs in to Postgres as
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
        """An empty one. The last run's is kept beside it, older ones are not, so that logs do not grow for ever."""
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
        """Everything but the lock, and the format last: what is half emptied is still known to be ours."""
        for name in sorted(os.listdir(self.path), key=lambda name: name == "format"):
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif name != "lock":
                path.unlink()

    def prepare(self) -> None:
        """Refuse another version's data, and make the rooms that are not there yet."""
        format_file = self.path / "format"
        found = format_file.read_text().strip() if format_file.exists() else FORMAT
        if found != FORMAT:
            raise CannotStart(
                f"{self.path} holds the data of another version of Leasehold ({found[:80]!r}; this one reads "
                f"{FORMAT!r}): choose another directory with --data, or lose what is in it with --fresh"
            )
        format_file.write_text(f"{FORMAT}\n")
        for path in (self.path / "logs", *map(self.store, REGIONS), *map(self.agent, REGIONS)):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def secrets(self) -> Secrets:
        if not self._secrets_file.exists():
            if self.postgres.exists():
                raise CannotStart(f"{self._secrets_file} is gone, and with it the passwords: start with --fresh")
            write_private(self._secrets_file, _new_secrets()._asdict())
        known = json.loads(self._secrets_file.read_text())
        if "coordinator" not in known:  # of a version whose coordinator came as the owner
            known["coordinator"] = secrets.token_urlsafe(24)
            write_private(self._secrets_file, known)
        return Secrets(**known)

    def remember(self, running: Mapping[str, Identity]) -> None:
        write_private(self._running_file, running)

    def left_running(self) -> dict[str, Identity]:
        """The processes of a launcher that could not end them. They may have ended since."""
        if not self._running_file.exists():
            return {}
        with suppress(ValueError, TypeError, AttributeError):
            return {name: Identity(*who) for name, who in json.loads(self._running_file.read_text()).items()}
        return {}

    def forget(self) -> None:
        self.stack_file.unlink(missing_ok=True)
        self._running_file.unlink(missing_ok=True)


def open_data_directory(path: Path) -> DataDirectory:
    """Lock the directory for this launcher. Raises CannotStart."""
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
        raise CannotStart(f"{path} is not empty, and not a data directory of Leasehold: choose another with --data")


def _new_secrets() -> Secrets:
    # web.tokens makes tokens of the same shape; importing it would make the launcher wait for what it does not need.
    tokens = {scope: f"lh_{secrets.token_urlsafe(32)}" for scope in SCOPES}
    owner, coordinator = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    return Secrets(owner, coordinator, {region: secrets.token_urlsafe(24) for region in REGIONS}, tokens)


def write_private(path: Path, value: Any) -> None:
    """Whole or not at all, and never readable by others, not even for a moment."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
    unfinished.replace(path)
