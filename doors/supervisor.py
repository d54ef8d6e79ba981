"""Several workers and their parent: one that dies is begun again, and a signal reaches all of them.

The parent opens what they share before there are any, and answers nobody: there is nothing in it that could fail. It
waits for one thing at a time, a signal: to end, of a worker that ended, or of its own alarm clock. A worker is a copy
of it (a fork, for there is neither a thread nor a loop yet) in a process group of its own, so that Ctrl-C in a terminal
reaches the parent only. Should the parent be killed, its workers end as if they had been told to.
"""

import os
import signal
import threading
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple, NoReturn

import structlog

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
STEADY_S = 10.0  # who lived so long is begun again as if it had never failed

_HEARD = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM}
_log = structlog.get_logger("doors.supervisor")


class _Life(NamedTuple):
    worker: int
    began_s: float


def supervise(workers: int, work: Callable[[int], None]) -> bool:
    """Have `work(number)` done by so many processes, until a signal comes and all have ended. True if they ended well.

    The first signal asks them to end, any later one to hurry.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    try:
        return _Supervisor(workers, work).run()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def next_pause_s(pause_s: float, lived_s: float) -> float:
    """How long to wait before a worker is begun again that waited `pause_s` the last time."""
    return FIRST_PAUSE_S if lived_s >= STEADY_S else min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))


class _Supervisor:
    def __init__(self, workers: int, work: Callable[[int], None]) -> None:
        self._work = work
        self._lives: dict[int, _Life] = {}  # by pid
        self._due_s = dict.fromkeys(range(workers), monotonic())  # who is to be begun, and when
        self._pause_s = dict.fromkeys(range(workers), 0.0)
        self._is_ending = False
        self._ended_well = True
        self._parent_lives, self._held_by_parent = os.pipe()

    def run(self) -> bool:
        while self._lives or not self._is_ending:
            self._begin_who_is_due()
            self._hear(signal.sigwait(_HEARD))
        return self._ended_well

    def _begin_who_is_due(self) -> None:
        for worker in [worker for worker, due_s in self._due_s.items() if due_s <= monotonic()]:
            del self._due_s[worker]
            self._begin(worker)
        if self._due_s:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, min(self._due_s.values()) - monotonic()))

    def _hear(self, heard: int) -> None:
        if heard == signal.SIGCHLD:
            self._note_who_ended()
        elif heard in {signal.SIGTERM, signal.SIGINT}:
            self._end(signal.SIGINT if self._is_ending else signal.SIGTERM)

    def _end(self, by: signal.Signals) -> None:
        self._is_ending = True
        self._due_s.clear()
        for pid in self._lives:
            os.kill(pid, by)

    def _note_who_ended(self) -> None:
        while self._lives:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if life := self._lives.pop(pid, None):  # as the first process of a container it gets strangers, too
                self._ended(life, os.waitstatus_to_exitcode(status))

    def _ended(self, life: _Life, status: int) -> None:
        if self._is_ending:
            self._ended_well &= status in {0, -signal.SIGTERM}  # by the signal itself: it had not begun to serve
            return
        pause_s = next_pause_s(self._pause_s[life.worker], monotonic() - life.began_s)
        self._pause_s[life.worker] = pause_s
        self._due_s[life.worker] = monotonic() + pause_s
        _log.error("a worker ended and is begun again", worker=life.worker, status=status, in_ms=int(pause_s * 1000))

    # --- in the worker -----------------------------------------------------------------------------------------------

    def _begin(self, worker: int) -> None:
        pid = os.fork()
        if pid == 0:
            self._be(worker)
        self._lives[pid] = _Life(worker, monotonic())

    def _be(self, worker: int) -> NoReturn:
        status = 1
        try:
            os.setpgid(0, 0)
            os.close(self._held_by_parent)
            threading.Thread(target=self._end_after_parent, name="parent", daemon=True).start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
            self._work(worker)
            status = 0
        except BaseException:
            _log.exception("a worker failed", worker=worker)
        finally:
            os._exit(status)  # what the parent has to tidy up is not the worker's

    def _end_after_parent(self) -> None:
        """Nothing is ever written: the read ends when the parent does."""
        os.read(self._parent_lives, 1)
        os.kill(os.getpid(), signal.SIGTERM)
