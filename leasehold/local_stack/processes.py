"""Processes that we start: how they begin, how they are told apart, how they end.

A child gets a session of its own, so that Ctrl-C in the terminal reaches only its parent, which then ends its children
in the right order. Should the parent be killed, the kernel ends the child in its place (where there is such a kernel).
A pid alone names nobody, for pids come round again: a process is its pid together with the moment it was started.
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
    """Start a child that writes to its log; `orphaned` is what it gets when its parent dies.

    One that `waits` reads a line before it does anything; others read nothing.
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
            # Safe, for it is called by one thread and does two system calls.
            preexec_fn=_end_with(os.getpid(), orphaned) if sys.platform == "linux" else None,  # noqa: PLW1509
        )
    finally:
        if not isinstance(output, int):
            output.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _end_with(parent: int, last_signal: signal.Signals) -> Callable[[], None]:
    libc = ctypes.CDLL(None)

    def ask_the_kernel() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(last_signal))
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    return ask_the_kernel


def identity(pid: int) -> Identity | None:
    """Who has this pid now; None if nobody (a zombie is nobody)."""
    if sys.platform != "linux":
        return _identity_by_ps(pid)
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else Identity(pid, f"{fields[19]} of {_boot()}")


@functools.cache
def _boot() -> str:
    """Moments of start are counted from the machine's, so they name nobody without it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _identity_by_ps(pid: int) -> Identity | None:
    answer = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)  # noqa: S603, S607
    started = answer.stdout.strip()
    return Identity(pid, started) if started else None


def is_running(who: Identity) -> bool:
    return identity(who.pid) == who


def stop(process: subprocess.Popen[bytes], *, by: signal.Signals = signal.SIGTERM, patience_s: float = 5.0) -> bool:
    """Ask a child to end, and insist after a while. True if it ended by itself."""
    if process.poll() is None:
        process.send_signal(by)
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def end_strangers(processes: Mapping[Identity, signal.Signals], *, patience_s: float = 3.0) -> list[Identity]:
    """End processes of an earlier launcher: asked first, each by its signal, then made to. Returns what still ran."""
    running = [who for who in processes if is_running(who)]
    for insists in (False, True):
        for who in filter(is_running, running):
            os.kill(who.pid, signal.SIGKILL if insists else processes[who])
        wait_until(lambda: not any(map(is_running, running)), patience_s)
    return running


def wait_until(condition: Callable[[], bool], patience_s: float) -> bool:
    """Poll a condition; False if it did not come true in time."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
