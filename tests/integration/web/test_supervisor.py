"""A supervisor restarts workers that die, passes signals on, and leaves no process behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from leasehold.local_stack.processes import Identity, identity, is_running, wait_until
from protocol.backoff import Backoff
from web.supervisor import (
    FIRST_PAUSE_S,
    HUNG_CHECKS,
    LONGEST_PAUSE_S,
    START_CHECKS,
    STEADY_S,
    _Process,
    next_pause_s,
)

PATIENCE_S = 30
PROGRAM = """
import os, signal, sys
from web.supervisor import supervise

signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM, signal.SIGINT}})

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def work(number, beat):
    signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM, signal.SIGINT}})
    say("began", number, os.getpid())
    {work}
    say("ended", number)

sys.exit(0 if supervise(2, work) else 1)
"""
HEAR = "say('heard', signal.sigwait({signal.SIGTERM, signal.SIGINT}).name)"


class Family:
    def __init__(self, parent: subprocess.Popen[bytes], output: Path) -> None:
        self.parent = parent
        self._output = output

    def said(self, *words: str) -> list[list[str]]:
        """Return the rest of each line that begins so."""
        lines = [line.split() for line in self._output.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [line[len(words) :] for line in lines if tuple(line[: len(words)]) == words]

    def wait_for(self, count: int, *words: str) -> None:
        assert wait_until(lambda: len(self.said(*words)) >= count, PATIENCE_S), self._output.read_text()

    def workers(self) -> list[Identity]:
        return [who for _, pid in self.said("began") if (who := identity(int(pid)))]


@contextmanager
def family(tmp_path: Path, work: str) -> Iterator[Family]:
    output = tmp_path / "output"
    with output.open("wb") as file:
        program = [sys.executable, "-c", PROGRAM.format(work=work)]
        parent = subprocess.Popen(program, stdout=file, start_new_session=True)
    try:
        yield Family(parent, output)
    finally:
        parent.kill()
        parent.wait()


def test_a_dead_worker_is_restarted_and_the_others_continue(tmp_path: Path) -> None:
    with family(tmp_path, HEAR) as ours:
        ours.wait_for(2, "began")
        victim, other = ours.workers()
        os.kill(victim.pid, signal.SIGKILL)
        ours.wait_for(3, "began")
        [again] = set(ours.workers()) - {other}
        assert is_running(again)
        numbers = [number for number, _ in ours.said("began")]
        assert numbers[2] == numbers[[pid for _, pid in ours.said("began")].index(str(victim.pid))]


BEATING = """
    while not signal.sigtimedwait({signal.SIGTERM, signal.SIGINT}, 0.2):
        beat()
        say('beat', number)
"""


def test_a_hanging_worker_is_killed_and_restarted_and_the_others_continue(tmp_path: Path) -> None:
    with family(tmp_path, BEATING) as ours:
        ours.wait_for(2, "began")
        victim, other = ours.workers()
        for number in "01":
            ours.wait_for(1, "beat", number)
        os.kill(victim.pid, signal.SIGSTOP)
        ours.wait_for(3, "began")
        assert not is_running(victim)
        assert is_running(other), "who counts on is left alone"
        ours.parent.send_signal(signal.SIGTERM)
        assert ours.parent.wait(PATIENCE_S) == 0


def test_a_hanging_worker_does_not_delay_the_end(tmp_path: Path) -> None:
    with family(tmp_path, BEATING) as ours:
        ours.wait_for(2, "began")
        victim, _ = ours.workers()
        for number in "01":
            ours.wait_for(1, "beat", number)
        os.kill(victim.pid, signal.SIGSTOP)
        ours.parent.send_signal(signal.SIGTERM)
        assert ours.parent.wait(PATIENCE_S) == 1


def test_a_worker_that_never_starts_has_longer() -> None:
    slow, hung = _Process(0, 0.0), _Process(1, 0.0)
    assert [slow.is_hung(0) for _ in range(START_CHECKS)] == [False] * (START_CHECKS - 1) + [True]
    assert [hung.is_hung(7) for _ in range(HUNG_CHECKS + 1)] == [False] * HUNG_CHECKS + [True]
    assert not hung.is_hung(8)


def test_a_worker_that_fails_each_time_is_restarted_each_time(tmp_path: Path) -> None:
    with family(tmp_path, f"number == 0 and 1 / 0; {HEAR}") as ours:
        ours.wait_for(3, "began", "0")
        assert len(ours.said("began", "1")) == 1
        ours.parent.send_signal(signal.SIGTERM)
        assert ours.parent.wait(PATIENCE_S) in {0, 1}  # one may be ending just then
        assert ours.said("heard") == [["SIGTERM"]]


def test_a_signal_reaches_all_and_the_parent_waits_for_them(tmp_path: Path) -> None:
    """Send Ctrl-C as a terminal does: workers get it from the parent, and once."""
    with family(tmp_path, HEAR) as ours:
        ours.wait_for(2, "began")
        os.killpg(ours.parent.pid, signal.SIGINT)
        assert ours.parent.wait(PATIENCE_S) == 0
        assert ours.said("heard") == [["SIGINT"], ["SIGINT"]]
        assert len(ours.said("ended")) == 2


def test_a_second_signal_ends_them_at_once(tmp_path: Path) -> None:
    with family(tmp_path, f"{HEAR}; {HEAR}") as ours:
        ours.wait_for(2, "began")
        ours.parent.send_signal(signal.SIGTERM)
        ours.wait_for(2, "heard", "SIGTERM")
        ours.parent.send_signal(signal.SIGTERM)
        assert ours.parent.wait(PATIENCE_S) == 0
        assert ours.said("heard")[2:] == [["SIGINT"], ["SIGINT"]]


def test_a_worker_that_ends_badly_is_reported(tmp_path: Path) -> None:
    with family(tmp_path, f"{HEAR}; number == 0 and 1 / 0") as ours:
        ours.wait_for(2, "began")
        ours.parent.send_signal(signal.SIGTERM)
        assert ours.parent.wait(PATIENCE_S) == 1


def test_no_worker_outlives_the_parent(tmp_path: Path) -> None:
    with family(tmp_path, HEAR) as ours:
        ours.wait_for(2, "began")
        workers = ours.workers()
        ours.parent.kill()
        ours.wait_for(2, "heard", "SIGINT")
        assert wait_until(lambda: not any(map(is_running, workers)), PATIENCE_S)


@pytest.mark.parametrize(
    ("pause_s", "lived_s", "next_s"),
    [
        (0.0, 0.0, FIRST_PAUSE_S),
        (FIRST_PAUSE_S, 0.0, 2 * FIRST_PAUSE_S),
        (LONGEST_PAUSE_S, 0.0, LONGEST_PAUSE_S),
        (LONGEST_PAUSE_S, STEADY_S, FIRST_PAUSE_S),
    ],
)
def test_a_worker_that_dies_at_once_again_is_restarted_later(pause_s: float, lived_s: float, next_s: float) -> None:
    assert next_pause_s(Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, pause_s), lived_s) == next_s
