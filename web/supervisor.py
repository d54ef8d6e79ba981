"""Several workers and their parent: one that dies or hangs is begun again, and a signal reaches all of them.

The parent opens what they share before there are any, and answers nobody: there is nothing in it that could fail. It
waits for one thing at a time, a signal: to end, of a worker that ended, or of its own alarm clock. A worker is a copy
of it (a fork, for there is neither a thread nor a loop yet) in a process group of its own, so that Ctrl-C in a terminal
reaches the parent only, which passes it on. Should the parent be killed, its workers end as if by Ctrl-C.

A worker that hangs does not end by itself. So each counts on, in memory that they share, for as long as it gets on with
its work, and the parent looks once a second: who has not counted in ten looks is killed. Looks are counted and not
seconds, so that a machine that stands still for a while accuses nobody.
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
STEADY_S = 10.0  # who lived so long is begun again as if it had never failed

LOOK_S = 1.0
HUNG_LOOKS = 10  # in which a worker has not counted on
BEGIN_LOOKS = 60  # until it counts for the first time

_HEARD = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM}
_log = structlog.get_logger("web.supervisor")


Beat = Callable[[], None]
Work = Callable[[int, Beat], None]


@dataclass(slots=True)
class _Process:
    worker: int
    began_s: float
    beats: int = 0
    looks: int = 0  # since it counted on

    def is_hung(self, beats: int) -> bool:
        """At another look."""
        self.looks = self.looks + 1 if beats == self.beats else 0
        self.beats = beats
        return self.looks >= (HUNG_LOOKS if beats else BEGIN_LOOKS)


def supervise(workers: int, work: Work) -> bool:
    """Have `work(number, beat)` done by so many processes, until a signal comes and all have ended. True if they ended
    well. Each calls `beat` at least every few seconds.

    The first signal is passed on and asks them to end: SIGTERM with what they do first, such as a lame duck period,
    SIGINT at once. Any later one asks them to hurry.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    try:
        return _Supervisor(workers, work).run()
    finally:
        _stop_the_alarm()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop_the_alarm() -> None:
    """Also one that has rung unheard: it would end the caller."""
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
        self._due_s = dict.fromkeys(range(workers), monotonic())  # who is to be begun, and when
        self._backoff_s = [Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S) for _ in range(workers)]
        self._beats = memoryview(mmap.mmap(-1, 8 * workers)).cast("Q")  # by worker; each writes its own
        self._look_at_s = monotonic() + LOOK_S
        self._is_ending = False
        self._ended_well = True
        self._parent_lives, self._held_by_parent = os.pipe()

    def run(self) -> bool:
        while self._lives or not self._is_ending:
            self._begin_who_is_due()
            self._end_who_hangs()
            self._set_alarm()
            self._hear(signal.sigwait(_HEARD))
        return self._ended_well

    def _begin_who_is_due(self) -> None:
        for worker in [worker for worker, due_s in self._due_s.items() if due_s <= monotonic()]:
            del self._due_s[worker]
            self._begin(worker)

    def _end_who_hangs(self) -> None:
        """It is begun again like one that died."""
        if monotonic() < self._look_at_s:
            return
        self._look_at_s = monotonic() + LOOK_S
        for pid, process in self._lives.items():
            if process.is_hung(self._beats[process.worker]):
                _log.error("a worker hangs and is killed", worker=process.worker, pid=pid)
                os.kill(pid, signal.SIGKILL)

    def _set_alarm(self) -> None:
        next_s = min([self._look_at_s, *self._due_s.values()])
        signal.setitimer(signal.ITIMER_REAL, max(0.001, next_s - monotonic()))

    def _hear(self, heard: int) -> None:
        if heard == signal.SIGCHLD:
            self._note_who_ended()
        elif heard in {signal.SIGTERM, signal.SIGINT}:
            self._end(signal.SIGINT if self._is_ending else signal.Signals(heard))

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
            if process := self._lives.pop(pid, None):  # as the first process of a container it gets strangers, too
                self._ended(process, os.waitstatus_to_exitcode(status))

    def _ended(self, process: _Process, status: int) -> None:
        if self._is_ending:
            # By the signal itself: it had not begun to serve.
            self._ended_well &= status in {0, -signal.SIGTERM, -signal.SIGINT}
            return
        pause_s = next_pause_s(self._backoff_s[process.worker], monotonic() - process.began_s)
        self._due_s[process.worker] = monotonic() + pause_s
        _log.error("a worker ended and is begun again", worker=process.worker, status=status, in_ms=int(pause_s * 1000))

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
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
            self._work(worker, partial(self._beat, worker))
            status = 0
        except BaseException:
            _log.exception("a worker failed", worker=worker)
        finally:
            os._exit(status)  # what the parent has to tidy up is not the worker's

    def _beat(self, worker: int) -> None:
        self._beats[worker] += 1

    def _end_after_parent(self) -> None:
        """End at once when the parent dies, for its successor wants the port. Nothing is ever written to this pipe."""
        os.read(self._parent_lives, 1)
        os.kill(os.getpid(), signal.SIGINT)
