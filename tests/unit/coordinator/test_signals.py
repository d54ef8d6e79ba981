"""Signals reach the regions they concern, and a slow reader cannot fill the memory."""

import msgspec
import pytest

from coordinator.notice import Notice
from coordinator.signals import MAX_WAITING_SIGNALS, SignalHub
from protocol.messages import Signal

pytestmark = pytest.mark.anyio


def payload(kind: str, region: str | None = None, keep: int = 0) -> str:
    return msgspec.json.encode(Notice(Signal(kind=kind, keep=keep), region)).decode()


async def test_a_region_receives_its_own_signals_and_those_for_all() -> None:
    hub = SignalHub()
    with hub.subscribe("us-east") as east, hub.subscribe("eu-west") as west:
        hub.deliver(payload("recall", "us-east"))
        hub.deliver(payload("policies"))
        assert [signal.kind for signal in await east.take(1) or []] == ["recall", "policies"]
        assert [signal.kind for signal in await west.take(1) or []] == ["policies"]
    assert len(hub) == 0


async def test_no_signal_within_the_wait_is_an_empty_list() -> None:
    with SignalHub().subscribe("us-east") as quiet:
        assert await quiet.take(0.001) == []


async def test_the_oldest_signals_of_a_slow_reader_are_dropped() -> None:
    hub = SignalHub()
    with hub.subscribe("us-east") as slow:
        for number in range(MAX_WAITING_SIGNALS + 10):
            hub.deliver(payload("recall", keep=number))
        taken = await slow.take(1) or []
        assert [signal.keep for signal in taken] == list(range(10, MAX_WAITING_SIGNALS + 10))


async def test_closing_ends_waiting_and_later_readers() -> None:
    hub = SignalHub()
    with hub.subscribe("us-east") as early:
        hub.close()
        assert await early.take(60) is None
    with hub.subscribe("us-east") as late:
        assert await late.take(60) is None
