"""A call to the store times out by the store's own delay, not by that of a busy event loop."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from regional_agent.metrics import StoreCallMetrics
from regional_agent.store.call_statistics import StoreCallStatistics
from regional_agent.store.connection import BUSY_STORE_FACTOR, NoAnswer, _Protocol
from regional_agent.store.rules.decision_timeout import DecisionTimeout

PATIENCE_S = 0.005
IN_TIME_S, TOO_LATE_S = 0.004, 0.0015


class Turns:
    """An event loop with what a connection uses of it. `busy` is time during which it does not run."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[tuple[float, Callable[[], object]]] = []
        self._soon: list[Callable[[], object]] = []
        self.socket: list[bytes] = []
        self.statistics = StoreCallStatistics(DecisionTimeout(1_000, 1_000))
        self.protocol = _Protocol(cast(asyncio.AbstractEventLoop, self), lambda: None, self.statistics)
        self.protocol.connection_made(cast(asyncio.BaseTransport, Wire()))

    def time(self) -> float:
        return self.now

    def call_at(self, moment: float, callback: Callable[..., object], *arguments: Any) -> None:
        self._timers.append((moment, lambda: callback(*arguments)))

    def call_soon(self, callback: Callable[..., object], *arguments: Any) -> None:
        self._soon.append(lambda: callback(*arguments))

    def busy(self, seconds: float) -> None:
        self.now += seconds

    def turn(self) -> None:
        """Run due timers, then scheduled callbacks, and only then read the socket, which is the worst order."""
        due = [callback for moment, callback in self._timers if moment <= self.now]
        self._timers = [each for each in self._timers if each[0] > self.now]
        soon, self._soon = self._soon, []
        for callback in (*due, *soon):
            callback()
        replies, self.socket = self.socket, []
        for reply in replies:
            self.protocol.data_received(reply)

    def run(self, seconds: float) -> None:
        """Wake at each timer's moment, as an idle process does."""
        until = self.now + seconds
        while self._soon or any(moment <= until for moment, _ in self._timers):
            if not self._soon:
                self.now = max(self.now, min(moment for moment, _ in self._timers))
            self.turn()
        self.now = until


class Wire:
    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        assert data


@pytest.fixture
def turns() -> Turns:
    return Turns()


def ask(turns: Turns, patience_s: float = PATIENCE_S) -> list[Any]:
    heard: list[Any] = []
    turns.protocol.send(("PING",), heard.append, patience_s, at_once=True, is_decision=True)
    return heard


def test_a_silent_store_is_waited_for_exactly_the_timeout(turns: Turns) -> None:
    heard = ask(turns)
    turns.run(IN_TIME_S)
    assert not heard
    turns.run(TOO_LATE_S)
    assert [type(each) for each in heard] == [NoAnswer], "nobody knows whether it was done"
    turns.socket = [b"+PONG\r\n"]
    turns.turn()
    assert len(heard) == 1, "what comes later is thrown away"
    again = ask(turns)
    turns.socket = [b"+PONG\r\n"]
    turns.turn()
    assert again == [b"PONG"]


def test_each_call_has_its_own_timeout(turns: Turns) -> None:
    patient, hurried = ask(turns, 0.25), ask(turns)
    turns.run(0.01)
    assert (patient, len(hurried)) == ([], 1)
    turns.run(0.25)
    assert len(patient) == 1


def test_the_socket_is_read_before_a_call_times_out(turns: Turns) -> None:
    """The process was paused, for long or twice, while the replies arrived in time."""
    heard = ask(turns)
    turns.socket = [b"+PONG\r\n"]
    turns.busy(10 * PATIENCE_S)
    turns.turn()
    assert heard == [b"PONG"]
    ask(turns)
    turns.busy(PATIENCE_S)
    turns._timers, timers = [], turns._timers
    late = ask(turns)
    turns._timers += timers
    turns.turn()
    turns.busy(PATIENCE_S)
    turns.socket = [b"+PONG\r\n+PONG\r\n"]
    for _ in range(4):
        turns.turn()
    assert late == [b"PONG"]


def test_a_busy_machine_extends_a_timeout_and_only_once(turns: Turns) -> None:
    heard = ask(turns)
    turns.busy(2 * PATIENCE_S)
    for _ in range(5):
        turns.turn()
    assert not heard, "it was this process that did not come round"
    turns.run(PATIENCE_S)
    assert len(heard) == 1, "nobody hangs"


def test_a_call_behind_others_has_longer_while_the_store_replies(turns: Turns) -> None:
    for _ in range(20):
        ask(turns)
    last = ask(turns)
    for _ in range(3):
        turns.run(IN_TIME_S)
        turns.socket = [b"+PONG\r\n"]
        turns.turn()
        assert not last, "it is being worked off"
    turns.run(IN_TIME_S)
    turns.socket = [b"+PONG\r\n"]
    turns.turn()
    turns.run(BUSY_STORE_FACTOR * PATIENCE_S - 4 * IN_TIME_S + 0.003)
    assert len(last) == 1, "but not for ever"


def test_failed_calls_are_counted_by_kind_and_late_replies_are_measured(turns: Turns) -> None:
    ask(turns)
    turns.run(2 * PATIENCE_S)
    turns.socket = [b"+PONG\r\n"]
    turns.turn()
    for error in (b"OOM command not allowed", b"A-NAME-OF-ITS-OWN no", b"ERR no"):
        ask(turns)
        turns.socket = [b"-" + error + b"\r\n"]
        turns.turn()
    ask(turns)
    turns.protocol.connection_lost(None)
    failures = {"timeout": 1, "oom": 1, "other": 1, "err": 1, "connection_lost": 1}
    assert dict(turns.statistics.failures) == failures
    registry = CollectorRegistry()
    StoreCallMetrics(registry, turns.statistics)
    name, decisions = "leasehold_store_call_duration_seconds", {"kind": "decision"}
    assert registry.get_sample_value(f"{name}_count", decisions) == 4
    assert registry.get_sample_value(f"{name}_bucket", decisions | {"le": "0.005"}) == 3, "one was late"
    assert registry.get_sample_value("leasehold_store_errors_total", {"kind": "oom"}) == 1
