"""Children never outlive their parent unnoticed, and other processes are never taken for children."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from leasehold.local_stack.processes import Identity, end_processes, identity, is_running, spawn, stop, wait_until

PATIENCE_S = 20
SLEEP = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, lambda *_: 0); print('up', flush=True); time.sleep(600)",
]


@contextmanager
def child(command: list[str], log: Path) -> Iterator[Identity]:
    """Yield a child that has started and reported so."""
    process = spawn(command, log=log)
    try:
        assert wait_until(lambda: log.read_text() != "", PATIENCE_S)
        who = identity(process.pid)
        assert who
        yield who
    finally:
        process.kill()
        process.wait()


def test_a_child_is_identified_by_pid_and_start_time(tmp_path: Path) -> None:
    with child(SLEEP, tmp_path / "log") as who:
        assert is_running(who)
        assert not is_running(Identity(who.pid, "another moment"))
        assert os.getsid(who.pid) == who.pid  # so that Ctrl-C in our terminal does not reach it
    assert not is_running(who)


@pytest.mark.parametrize("command", [SLEEP, STUBBORN])
def test_processes_of_a_killed_launcher_are_stopped(command: list[str], tmp_path: Path) -> None:
    with child(command, tmp_path / "log") as who:
        assert end_processes({who: signal.SIGTERM}, timeout_s=0.5) == [who]
        assert not is_running(who)


def test_another_process_with_the_same_pid_is_left_alone(tmp_path: Path) -> None:
    with child(SLEEP, tmp_path / "log") as who:
        assert end_processes({Identity(who.pid, "another moment"): signal.SIGKILL}) == []
        assert is_running(who)


def test_a_process_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    process = spawn(STUBBORN, log=tmp_path / "log")
    assert wait_until(lambda: (tmp_path / "log").read_text() != "", PATIENCE_S)
    assert not stop(process, timeout_s=0.1)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children that their parent died")
def test_children_die_with_their_parent(tmp_path: Path) -> None:
    parent = f"""
import sys, time
from pathlib import Path
from leasehold.local_stack.processes import spawn
print(spawn({SLEEP!r}, log=Path({str(tmp_path / "log")!r})).pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        process.kill()
    assert wait_until(lambda: identity(pid) is None, PATIENCE_S)


def test_a_log_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    with child(SLEEP, tmp_path / "log"):
        assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
