"""A share's time runs from the request for it, however long the reply took, because the coordinator's does."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.limits.rates import Rate
from protocol.messages import RateReport, RateShare, SharesRequest, SharesResponse, SlotReport, SlotShare
from regional_agent.shared_limits.rules import RateDemand
from regional_agent.shared_limits.share_loop import ShareLoop
from regional_agent.shared_limits.shared_limit import SharedLimit
from regional_agent.store.types import (
    AgentRateDemand,
    AgentSlotDemand,
    RateReports,
    SlotCharge,
    SlotReports,
    StoreIncarnation,
)
from tests.unit.regional_agent.leasing.test_quotas import StandingClock

pytestmark = pytest.mark.anyio

API, JOBS = "api:tenant=acme", "jobs:tenant=acme"
LASTS_MS, LATE_MS = 8_000, 4_000


@dataclass
class Store:
    """A region with a clock of its own, which sends the time with each report."""

    mono_us: int = 7
    heard: list[tuple[str, int]] = field(default_factory=list)  # each share and when it was requested

    async def report_rates(self, _: StoreIncarnation, __: str, demands: Sequence[AgentRateDemand]) -> RateReports:
        return RateReports(self.mono_us, [RateReport(want.quota, 9_000_000, 0, 1_000_000) for want in demands])

    async def report_slots(self, _: StoreIncarnation, __: str, demands: Sequence[AgentSlotDemand]) -> SlotReports:
        return SlotReports(self.mono_us, [SlotReport(want.slots.quota, 1, 5, 0, 3) for want in demands])

    async def share_rates(self, _: StoreIncarnation, asked_us: int, __: Sequence[object]) -> int:
        self.heard.append(("rates", asked_us))
        return 1

    async def share_slots(self, _: StoreIncarnation, asked_us: int, __: Sequence[object]) -> int:
        self.heard.append(("slots", asked_us))
        return 1


@dataclass
class SlowCoordinator:
    store: Store
    clock: StandingClock

    async def shares(self, _: SharesRequest) -> SharesResponse:
        self.store.mono_us += 1000 * LATE_MS
        self.clock.now_ms += LATE_MS
        rate = RateShare(API, 1, 5_000_000, 1_000_000, LASTS_MS, 2_000, contended=True)
        return SharesResponse([rate], [SlotShare(JOBS, 1, 4, 3, LASTS_MS, 2_000, 300_000, contended=True)])


async def test_a_share_falls_at_a_fixed_time_after_its_request_however_late_the_reply() -> None:
    store, clock = Store(), StandingClock(now_ms=1_000)
    nobody: Any = SimpleNamespace()
    scripts: Any = store
    coordinator: Any = SlowCoordinator(store, clock)
    sharing = ShareLoop("an agent", scripts, nobody, nobody, coordinator, nobody, clock)
    keys = [
        SharedLimit(API, Rate(1_000_000, 10), RateDemand(0)),
        SharedLimit(JOBS, SlotCharge(JOBS, 1, 9, 300_000, base_share=3), RateDemand(0)),
    ]
    await sharing._exchange(StoreIncarnation("an incarnation", 1, 4), {key.quota: key for key in keys}, clock.now_ms)
    assert store.heard == [("rates", 7), ("slots", 7)]
    assert [key.share.expires_ms for key in keys] == [1_000 + LASTS_MS] * 2
    assert [key.due_ms for key in keys] == [1_000 + 2_000] * 2, "and is asked for anew"
