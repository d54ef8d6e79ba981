"""Start, identify and stop processes.

A child gets a session of its own, so that Ctrl-C in the terminal reaches only its parent, which then stops its children
in the right order. If the parent is killed, Linux stops the child. A pid alone does not identify a process, because
pids are reused: a process is identified by its pid and its start time.
"""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

PR_SET_PDEATHSIG = 1
POLL_S = 0.01


class Identity(NamedTuple):
    pid: int
    started: str


def spawn(
    command: Sequence[str | Path],
    *,
    log: Path | None = None,
    environ: Mapping[str, str] | None = None,
    orphaned: signal.Signals = signal.SIGTERM,
    waits: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a child that writes to its log. `orphaned` is the signal that it gets when its parent dies.

    A child that `waits` reads a line from its standard input before it does anything; others read nothing.
    """
    output: IO[bytes] | int = open(log, "ab", opener=_private) if log else subprocess.DEVNULL  # noqa: SIM115
    try:
        return subprocess.Popen(  # noqa: S603 - our own commands
            [str(part) for part in command],
            stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
            # Safe, because one thread calls it and it does two system calls.
            preexec_fn=_end_with(os.getpid(), orphaned) if sys.platform == "linux" else None,  # noqa: PLW1509
        )
    finally:
        if not isinstance(output, int):
            output.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _end_with(parent: int, last_signal: signal.Signals) -> Callable[[], None]:
    libc = ctypes.CDLL(None)

    def request_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(last_signal))
        if os.getppid() != parent:  # the parent died before the request
            os._exit(1)

    return request_signal


def identity(pid: int) -> Identity | None:
    """Return the process that has this pid now, or None. A zombie counts as none."""
    if sys.platform != "linux":
        return _identity_by_ps(pid)
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else Identity(pid, f"{fields[19]} of {_boot()}")


@functools.cache
def _boot() -> str:
    """Return the id of the machine's boot, from which start times are counted."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _identity_by_ps(pid: int) -> Identity | None:
    answer = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)  # noqa: S603, S607
    started = answer.stdout.strip()
    return Identity(pid, started) if started else None


def is_running(process: Identity) -> bool:
    return identity(process.pid) == process


def stop(process: subprocess.Popen[bytes], *, by: signal.Signals = signal.SIGTERM, timeout_s: float = 5.0) -> bool:
    """Stop a child with a signal, and kill it after the time-out. Return whether the signal was enough."""
    if process.poll() is None:
        process.send_signal(by)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def end_processes(processes: Mapping[Identity, signal.Signals], *, timeout_s: float = 3.0) -> list[Identity]:
    """Stop processes of an earlier launcher, each with its signal or by SIGKILL. Return those that were running."""
    running = [process for process in processes if is_running(process)]
    for kills in (False, True):
        for process in filter(is_running, running):
            os.kill(process.pid, signal.SIGKILL if kills else processes[process])
        wait_until(lambda: not any(map(is_running, running)), timeout_s)
    return running


def wait_until(condition: Callable[[], bool], timeout_s: float, pause_s: float = POLL_S) -> bool:
    """Poll a condition. Return whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True
