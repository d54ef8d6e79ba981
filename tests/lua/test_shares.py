"""What `StoredShare` reasons about and what the store does with a share are the same, whatever is said and whenever.

Tests of the coordinator and benchmarks reason about shares without a store, and believe `StoredShare` because of this.
"""

from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from benchmarks.allocation.shares import KEPT_MS, LATEST_REPLY_MS, StoredShare, kept_micro, share_of_grant
from protocol.messages import RateShare
from regional_agent.shared_limits.rules import requested_micro
from regional_agent.store.types import AgentRateDemand
from tests.budget import examples
from tests.conftest import Server
from tests.lua.script_helpers import RATE
from tests.lua.test_algorithms import LIFE, STEADY, Clocked, limit_of
from tests.lua.wire import at_once

AGENT = "one"
EXPIRES_MS = 8_000


class Wait(NamedTuple):
    us: int


class Take(NamedTuple):
    cost: int


class Report(NamedTuple):
    demand_micro: int
    is_contended: bool


class Give(NamedTuple):
    number: int
    rate_micro: int
    after_micro: int
    expires_in_ms: int
    late_us: int  # how long ago it was requested


Step = Wait | Take | Report | Give


@dataclass
class Beside:
    """One share, in a store and in the model."""

    clocked: Clocked
    share: StoredShare = field(default_factory=StoredShare)

    @property
    def mono_us(self) -> int:
        return at_once(self.clocked.scripts.report_rates(LIFE, AGENT, [])).mono_us

    def do(self, step: Step) -> None:
        match step:
            case Wait(us):
                self.clocked.advance(us)
            case Take(cost):
                self.clocked.take(cost, limit_of(self.clocked.algorithm))
            case Report():
                self.report(step)
            case Give():
                self.give(step)

    def report(self, report: Report) -> None:
        """Give up unused units in both, and compare what they report."""
        in_force_micro, limit = self.in_force_micro(), limit_of(self.clocked.algorithm)
        wanted = requested_micro(report.demand_micro, self.in_bucket(), limit.burst, report.is_contended)
        kept = kept_micro(wanted, in_force_micro, report.is_contended)
        if kept < in_force_micro:
            self.share = self.share.lowered(kept)
        assert self.told(report) == (self.share.number_at(self.mono_us), self.in_force_micro(), wanted)

    def in_bucket(self) -> int:
        return self.clocked.take(0, limit_of(self.clocked.algorithm), "peek").available

    def in_force_micro(self) -> int:
        return self.share.in_force_micro(self.mono_us, int(limit_of(self.clocked.algorithm).rate_micro))

    def told(self, report: Report) -> tuple[int, int, int]:
        want = AgentRateDemand(RATE, limit_of(self.clocked.algorithm), report.demand_micro, report.is_contended)
        (said,) = at_once(self.clocked.scripts.report_rates(LIFE, AGENT, [want])).reports
        return said.number, said.rate_micro, said.demand_micro

    def give(self, give: Give) -> None:
        sent_us = self.mono_us - give.late_us
        terms = (give.number, give.rate_micro, min(give.rate_micro, give.after_micro), give.expires_in_ms)
        heard = self.share.replaced_by(share_of_grant(*terms, sent_us), sent_us, self.mono_us)
        share = RateShare(RATE, *terms, refresh_in_ms=1_000, contended=False)
        new = at_once(self.clocked.scripts.share_rates(LIFE, sent_us, [(limit_of(self.clocked.algorithm), share)]))
        assert new == (heard is not self.share)
        self.share = heard


edges_us = [1_000 * ms + us for ms in (EXPIRES_MS, LATEST_REPLY_MS, KEPT_MS) for us in (-1, 0, 1)]
rates_micro = st.sampled_from([0, 1, 833, 1_000_000, 40_000_000, 99_999_999, 100_000_000, 10**12])
steps = st.one_of(
    st.builds(Wait, st.one_of(st.integers(0, 50_000_000), st.sampled_from(edges_us))),
    st.builds(Take, st.integers(1, 10)),
    st.builds(Report, rates_micro, st.booleans()),
    st.builds(
        Give,
        st.integers(1, 6),
        rates_micro,
        rates_micro,
        st.sampled_from([1, EXPIRES_MS, 20_000]),
        st.one_of(st.just(0), st.integers(0, 6_000_000), st.sampled_from(edges_us)),
    ),
)
SHARE = Give(number=3, rate_micro=40_000_000, after_micro=833, expires_in_ms=EXPIRES_MS, late_us=0)


@pytest.mark.parametrize("algorithm", STEADY)
@settings(max_examples=examples(50), suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])
@given(drawn=st.lists(steps, min_size=5, max_size=30))
@example(drawn=[SHARE, *(Wait(us) for us in (1, 7_999_998, 1, 1, 31_999_998, 1))])  # each end, and just before
@example(drawn=[SHARE, Report(32_000_000, True), Report(31_999_999, True), SHARE._replace(number=4, late_us=5_000_001)])
@example(
    drawn=[SHARE, Wait(9_000_000), Take(1), Report(1, True), Wait(31_000_000), SHARE]
)  # an ended share is forgotten
def test_a_share_in_the_store_equals_the_model(store_server: Server, algorithm: str, drawn: list[Step]) -> None:
    with closing(Clocked(store_server, algorithm)) as clocked:
        clocked.advance(10_000_000)  # so that earlier requests are not before the store's time
        beside = Beside(clocked)
        for step in drawn:
            beside.do(step)
            beside.report(Report(10**12, False))
