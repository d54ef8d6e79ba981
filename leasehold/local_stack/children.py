"""The processes of a running stack: started one by one, remembered on disk at once, ended in stages.

An end in order is what keeps units from being stranded: agents give back what they did not spend while the coordinator
can still book it, and the coordinator ends while Postgres can still commit it. The stages share ten seconds.
"""

import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from leasehold.local_stack.data_directory import DataDirectory
from leasehold.local_stack.processes import Identity, end_strangers, identity, wait_until

LAST_WORDS = 10
LONGEST_WORD = 400
PREPARE = "prepare"  # the one child that is meant to end


class Stage(NamedTuple):
    prefixes: tuple[str, ...]
    patience_s: float
    may_be_hurried: bool


STAGES = (
    Stage((PREPARE, "agent-"), 5.0, True),
    Stage(("relay-",), 0.5, True),
    Stage(("coordinator",), 2.5, True),
    Stage(("store-", "postgres"), 10.0, False),  # its last checkpoint takes seconds where the disk is busy
)


class Ended(NamedTuple):
    name: str
    how: str
    last_words: list[str]

    def __str__(self) -> str:
        reason = self.last_words[-1] if self.last_words else "it left no word"
        if self.name == PREPARE:
            return f"the database could not be prepared: {reason}"
        return f"{self.name} {self.how}: {reason}"


class Children:
    def __init__(self, directory: DataDirectory) -> None:
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def add(self, name: str, start: Callable[[Path], subprocess.Popen[bytes]]) -> None:
        self._processes[name] = start(self._directory.new_log(name))
        self._remember()

    def _remember(self) -> None:
        found = {name: identity(process.pid) for name, process in self._processes.items()}
        self._directory.remember({name: who for name, who in found.items() if who})

    def tell(self, name: str) -> None:
        """Say the word that a child waits for. One that has ended hears nothing; `ended` will tell."""
        word = self._processes[name].stdin
        assert word is not None
        with suppress(BrokenPipeError):
            word.write(b"now\n")
            word.close()

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def has_done(self, name: str) -> bool:
        """True once a child that is meant to end has ended well. It is no child any more then."""
        if self._processes[name].poll() != 0:
            return False
        del self._processes[name]
        return True

    def ended(self) -> Ended | None:
        """The first of those that are not running any more, if any."""
        for name, process in self._processes.items():
            if process.poll() is not None and not (name == PREPARE and process.returncode == 0):
                return Ended(name, _how(process.returncode), last_words(self._directory.log(name)))
        return None

    def stop(self, is_hurried: Callable[[], bool]) -> list[str]:
        """End them all, stage by stage. Returns the names of those that had to be killed."""
        killed = []
        for stage in STAGES:
            processes = {name: process for name, process in self._processes.items() if name.startswith(stage.prefixes)}
            killed += _stop(processes, stage.patience_s, is_hurried if stage.may_be_hurried else lambda: False)
        return killed


def _stop(
    processes: Mapping[str, subprocess.Popen[bytes]], patience_s: float, is_hurried: Callable[[], bool]
) -> list[str]:
    for name, process in processes.items():
        if process.poll() is None:
            process.send_signal(stop_signal(name))
    wait_until(lambda: is_hurried() or all(process.poll() is not None for process in processes.values()), patience_s)
    stubborn = [name for name, process in processes.items() if process.poll() is None]
    for name in stubborn:
        processes[name].kill()
        processes[name].wait()
    return stubborn


def stop_signal(name: str) -> signal.Signals:
    """Postgres waits for its clients on SIGTERM, and not on SIGINT."""
    return signal.SIGINT if name == "postgres" else signal.SIGTERM


def _how(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def last_words(log: Path) -> list[str]:
    """The last lines of a log, each as far as people read. What Postgres adds to its reason is not its last word."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    told = [line for line in lines if line.strip() and "DETAIL:" not in line and "HINT:" not in line]
    return [shorten(line, LONGEST_WORD, placeholder=" …") for line in told[-LAST_WORDS:]]


def end_left_running(directory: DataDirectory) -> list[str]:
    """End what a killed launcher left. Returns the names of what was still there."""
    directory.stack_file.unlink(missing_ok=True)  # what it says is true no more
    left = directory.left_running()
    running: Sequence[Identity] = end_strangers({who: stop_signal(name) for name, who in left.items()})
    if "postgres" in left:
        _remove_lock_of(left["postgres"].pid, directory.postgres / "postmaster.pid")
    directory.forget()
    return [name for name, who in left.items() if who in running]


def _remove_lock_of(pid: int, lock: Path) -> None:
    """What was killed left its lock behind; another process that has its pid by now would keep the next from it."""
    try:
        if lock.read_text().split("\n", 1)[0] == str(pid):
            lock.unlink()
    except FileNotFoundError:
        return
