"""The processes of a running stack: started one by one, recorded on disk at once, stopped in stages.

The order of the stages keeps units from being stranded: agents return what they did not spend while the coordinator can
still book it, and the coordinator stops while Postgres can still commit it. The stages share ten seconds.
"""

import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from leasehold.local_stack.data_directory import DataDirectory
from leasehold.local_stack.processes import Identity, end_processes, identity, wait_until

LAST_LINES = 10
LONGEST_LINE = 400
PREPARE = "prepare"  # the only child that is expected to exit


class Stage(NamedTuple):
    prefixes: tuple[str, ...]
    timeout_s: float
    may_be_killed_early: bool


STAGES = (
    Stage((PREPARE, "agent-"), 5.0, True),
    Stage(("relay-",), 0.5, True),
    Stage(("coordinator",), 2.5, True),
    Stage(("store-", "postgres"), 10.0, False),  # its last checkpoint takes seconds where the disk is busy
)


class Exited(NamedTuple):
    name: str
    how: str
    last_lines: list[str]

    def __str__(self) -> str:
        reason = self.last_lines[-1] if self.last_lines else "its log is empty"
        if self.name == PREPARE:
            return f"the database could not be prepared: {reason}"
        return f"{self.name} {self.how}: {reason}"


class Children:
    def __init__(self, directory: DataDirectory) -> None:
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def add(self, name: str, start: Callable[[Path], subprocess.Popen[bytes]]) -> None:
        self._processes[name] = start(self._directory.new_log(name))
        self._record()

    def _record(self) -> None:
        found = {name: identity(process.pid) for name, process in self._processes.items()}
        self._directory.record_running({name: who for name, who in found.items() if who})

    def start_deferred(self, name: str) -> None:
        """Write the line that a child waits for. If the child has exited, `exited` will return it."""
        stdin = self._processes[name].stdin
        assert stdin is not None
        with suppress(BrokenPipeError):
            stdin.write(b"start\n")
            stdin.close()

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def has_succeeded(self, name: str) -> bool:
        """Return whether a child exited with status 0, and forget it then."""
        if self._processes[name].poll() != 0:
            return False
        del self._processes[name]
        return True

    def exited(self) -> Exited | None:
        """Return the first child that is not running any more."""
        for name, process in self._processes.items():
            if process.poll() is not None and not (name == PREPARE and process.returncode == 0):
                return Exited(name, _exit_of(process.returncode), last_lines(self._directory.log(name)))
        return None

    def stop(self, is_impatient: Callable[[], bool]) -> list[str]:
        """Stop all children, stage by stage. Return the names of those that had to be killed."""
        killed = []
        for stage in STAGES:
            processes = {name: process for name, process in self._processes.items() if name.startswith(stage.prefixes)}
            killed += _stop(processes, stage.timeout_s, is_impatient if stage.may_be_killed_early else lambda: False)
        return killed


def _stop(
    processes: Mapping[str, subprocess.Popen[bytes]], timeout_s: float, is_impatient: Callable[[], bool]
) -> list[str]:
    for name, process in processes.items():
        if process.poll() is None:
            process.send_signal(stop_signal(name))
    wait_until(lambda: is_impatient() or all(process.poll() is not None for process in processes.values()), timeout_s)
    stubborn = [name for name, process in processes.items() if process.poll() is None]
    for name in stubborn:
        processes[name].kill()
        processes[name].wait()
    return stubborn


def stop_signal(name: str) -> signal.Signals:
    """Return the signal that stops a child. On SIGTERM Postgres would wait for its clients."""
    return signal.SIGINT if name == "postgres" else signal.SIGTERM


def _exit_of(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a log, shortened, without the details that Postgres adds to its reason."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    reasons = [line for line in lines if line.strip() and "DETAIL:" not in line and "HINT:" not in line]
    return [shorten(line, LONGEST_LINE, placeholder=" …") for line in reasons[-LAST_LINES:]]


def end_left_running(directory: DataDirectory) -> list[str]:
    """Stop what a killed launcher left running. Return the names of those processes."""
    directory.stack_file.unlink(missing_ok=True)  # it is not true any more
    left = directory.left_running()
    running: Sequence[Identity] = end_processes({who: stop_signal(name) for name, who in left.items()})
    if "postgres" in left:
        _remove_lock_of(left["postgres"].pid, directory.postgres / "postmaster.pid")
    directory.forget()
    return [name for name, who in left.items() if who in running]


def _remove_lock_of(pid: int, lock: Path) -> None:
    """Remove the lock of a killed Postgres: the next one might not start if another process has its pid by now."""
    try:
        if lock.read_text().split("\n", 1)[0] == str(pid):
            lock.unlink()
    except FileNotFoundError:
        return
