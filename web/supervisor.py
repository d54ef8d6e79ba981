"""Supervise worker processes: restart those that die or hang, and pass signals on to all of them.
The parent opens shared sockets before it starts workers, and serves no requests. It waits for signals only: to end, of
a worker that ended, or of its own timer. A worker is a fork of it, which is safe while there is neither a thread nor an
event loop. It has a process group of its own, so that Ctrl-C in a terminal reaches only the parent, which passes it on.
If the parent is killed, its workers end as if by Ctrl-C.

A worker that hangs does not end by itself. So each worker increments a heartbeat in shared memory, which the parent
checks once a second: a worker without a heartbeat in ten checks is killed. Checks are counted and not seconds, so that
a paused machine kills no worker.
"""

import mmap
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import NoReturn

import structlog

from protocol.backoff import Backoff

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
STEADY_S = 10.0  # a worker that ran so long is restarted without a growing pause

CHECK_S = 1.0
HUNG_CHECKS = 10  # without a heartbeat
START_CHECKS = 60  # until the first heartbeat

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM}
_log = structlog.get_logger("web.supervisor")


Beat = Callable[[], None]
Work = Callable[[int, Beat], None]


@dataclass(slots=True)
class _Process:
    worker: int
    began_s: float
    beats: int = 0
    checks: int = 0  # since the last heartbeat

    def is_hung(self, beats: int) -> bool:
        """Note a check, and return whether the worker hangs."""
        self.checks = self.checks + 1 if beats == self.beats else 0
        self.beats = beats
        return self.checks >= (HUNG_CHECKS if beats else START_CHECKS)


def supervise(workers: int, work: Work) -> bool:
    """Run `work(number, beat)` in so many processes until a signal ends them, and return whether all ended cleanly.

    Each worker calls `beat` at least every few seconds. The first signal is passed on: SIGTERM lets workers shut down
    gracefully, with a lame duck period, and SIGINT at once. Any later signal is passed on as SIGINT.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return _Supervisor(workers, work).run()
    finally:
        _stop_the_alarm()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop_the_alarm() -> None:
    """Stop the timer, and discard a pending alarm, which would end the caller."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    if signal.SIGALRM in signal.sigpending():
        signal.sigwait({signal.SIGALRM})


def next_pause_s(backoff_s: Backoff, lived_s: float) -> float:
    """Return how long to wait before a worker that ended after `lived_s` is started again."""
    if lived_s >= STEADY_S:
        backoff_s.succeeded()
    return backoff_s.failed(0)


class _Supervisor:
    def __init__(self, workers: int, work: Work) -> None:
        self._work = work
        self._lives: dict[int, _Process] = {}  # by pid
        self._due_s = dict.fromkeys(range(workers), monotonic())  # which worker to start, and when
        self._backoff_s = [Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S) for _ in range(workers)]
        self._beats = memoryview(mmap.mmap(-1, 8 * workers)).cast("Q")  # by worker; each writes its own
        self._check_at_s = monotonic() + CHECK_S
        self._is_ending = False
        self._ended_well = True
        self._parent_lives, self._held_by_parent = os.pipe()

    def run(self) -> bool:
        while self._lives or not self._is_ending:
            self._start_due_workers()
            self._kill_hung_workers()
            self._set_alarm()
            self._handle(signal.sigwait(_SIGNALS))
        return self._ended_well

    def _start_due_workers(self) -> None:
        for worker in [worker for worker, due_s in self._due_s.items() if due_s <= monotonic()]:
            del self._due_s[worker]
            self._begin(worker)

    def _kill_hung_workers(self) -> None:
        """Kill workers that hang. They are restarted like those that died."""
        if monotonic() < self._check_at_s:
            return
        self._check_at_s = monotonic() + CHECK_S
        for pid, process in self._lives.items():
            if process.is_hung(self._beats[process.worker]):
                _log.error("worker killed because it hangs", worker=process.worker, pid=pid)
                os.kill(pid, signal.SIGKILL)

    def _set_alarm(self) -> None:
        next_s = min([self._check_at_s, *self._due_s.values()])
        signal.setitimer(signal.ITIMER_REAL, max(0.001, next_s - monotonic()))

    def _handle(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif number in {signal.SIGTERM, signal.SIGINT}:
            self._end(signal.SIGINT if self._is_ending else signal.Signals(number))

    def _end(self, by: signal.Signals) -> None:
        self._is_ending = True
        self._due_s.clear()
        for pid in self._lives:
            os.kill(pid, by)

    def _reap(self) -> None:
        while self._lives:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if process := self._lives.pop(pid, None):  # as process 1 of a container it also reaps others
                self._ended(process, os.waitstatus_to_exitcode(status))

    def _ended(self, process: _Process, status: int) -> None:
        if self._is_ending:
            # A worker that had not begun to serve dies of the signal itself.
            self._ended_well &= status in {0, -signal.SIGTERM, -signal.SIGINT}
            return
        pause_s = next_pause_s(self._backoff_s[process.worker], monotonic() - process.began_s)
        self._due_s[process.worker] = monotonic() + pause_s
        _log.error("worker ended, restarting", worker=process.worker, status=status, in_ms=int(pause_s * 1000))

    # --- in the worker -----------------------------------------------------------------------------------------------

    def _begin(self, worker: int) -> None:
        self._beats[worker] = 0
        pid = os.fork()
        if pid == 0:
            self._be(worker)
        self._lives[pid] = _Process(worker, monotonic())

    def _be(self, worker: int) -> NoReturn:
        status = 1
        try:
            os.setpgid(0, 0)
            os.close(self._held_by_parent)
            threading.Thread(target=self._end_after_parent, name="parent", daemon=True).start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            self._work(worker, partial(self._beat, worker))
            status = 0
        except BaseException:
            _log.exception("worker failed", worker=worker)
        finally:
            os._exit(status)  # cleanup is the parent's

    def _beat(self, worker: int) -> None:
        self._beats[worker] += 1

    def _end_after_parent(self) -> None:
        """End when the parent dies, so that its successor can bind the port. Nothing is ever written to this pipe."""
        os.read(self._parent_lives, 1)
        os.kill(os.getpid(), signal.SIGINT)
