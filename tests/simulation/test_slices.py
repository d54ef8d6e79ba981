"""Slices against the same agent without them: the same requests at the same moments, on virtual time, over a wire.

The store is the one of scripted_store.py, which runs the real scripts.
"""

import asyncio
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.check import Check, CheckAnswer, Mode, Subject
from protocol.circuit_breaker import CircuitBreaker
from protocol.limits.document import LimitsDocument, PolicyBundle, PolicySpec, RateQuota
from protocol.limits.rates import RateAlgorithm, parse_rate
from regional_agent.admission.engine import AdmissionEngine
from regional_agent.admission.key_states import KeyStates
from regional_agent.admission.policies import Policies
from regional_agent.admission.rules.slices import HOT, LIFETIME_MS, MAX_SHARE
from regional_agent.admission.token_slices import TokenSlices
from regional_agent.decision_log.losses import Losses
from regional_agent.decision_log.recorder import DecisionRecorder
from regional_agent.leasing.quotas import Quotas
from regional_agent.metrics import AgentMetrics
from regional_agent.shared_limits.share_loop import ShareLoop
from regional_agent.store.check_calls import CheckBatcher
from regional_agent.store.circuit_breaker import StoreCircuitBreaker
from regional_agent.store.connection import OnReply
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import StoreIncarnation
from regional_agent.store_outage.fallback import OutageFallback
from regional_agent.store_outage.journal import Journal
from tests.budget import examples
from tests.simulation.simulated.stores import Machine, VirtualConnection
from tests.simulation.simulated.virtual_time import VirtualClock, VirtualLoop

START = datetime(2026, 11, 18, tzinfo=UTC)
QUOTA = "api:tenant=acme"
SLICED = ["gcra", "token_bucket"]


class Asked(NamedTuple):
    after_us: int
    cost: int = 1
    mode: Mode = "enforce"
    agent: int = 0


class Said(NamedTuple):
    at_ms: Fraction
    asked: Asked
    answer: CheckAnswer

    @property
    def numbers(self) -> tuple[int, ...]:
        (policy,) = self.answer.policies
        return policy.limit, policy.remaining, policy.reset_ms, policy.retry_after_ms or 0


class OneIncarnation:
    """an incarnation that does not end, until somebody says so."""

    may_evict = False

    def __init__(self, current: StoreIncarnation) -> None:
        self.current: StoreIncarnation | None = current

    def invalidate(self) -> None:
        raise AssertionError("nothing here ends an incarnation")


class Region:
    """Agents on one store, and what comes of what they are asked."""

    def __init__(self, loop: VirtualLoop, limit: str, algorithm: str, *, slices: bool) -> None:
        self.clock = VirtualClock(loop, START)
        self.machine = Machine("us-east", self.clock, random.Random(0), lambda _: None)
        quota = RateQuota(name="api", limit=limit, algorithm=RateAlgorithm(algorithm), slices=slices)
        policies = [PolicySpec(name="search", quota="api", by=["tenant"])]
        document = LimitsDocument(quotas=[quota], policies=policies)
        self.bundle = PolicyBundle(version=1, document=document, subscriptions={}, weight=1, total_weight=1)
        self.agents: list[Agent] = []
        self._connections: list[VirtualConnection] = []

    async def begin(self, agents: int) -> None:
        connection = await self._connected()
        scripts, fingerprint = Scripts(connection), await connection.read_fingerprint()
        await scripts.begin_incarnation(fingerprint, "a" * 16)
        await scripts.adopt_epoch(fingerprint, "a" * 16, 7, 4)
        for _ in range(agents):
            self.agents.append(Agent(self, await self._connected(), StoreIncarnation(fingerprint, 7, 4)))

    async def _connected(self) -> VirtualConnection:
        connected = asyncio.Event()
        connection = VirtualConnection(self.machine, lambda: True, timeout_ms=1_000, on_connected=connected.set)
        self._connections.append(connection)
        connection.keep()
        await connected.wait()
        return connection

    async def end(self) -> None:
        for agent in self.agents:
            agent.slices.close()
        for connection in self._connections:
            await connection.close()

    async def run(self, asked: Sequence[Asked]) -> list[Said]:
        tasks = []
        for each in asked:
            await asyncio.sleep(each.after_us / 1_000_000)
            tasks.append(asyncio.create_task(self.agents[each.agent].ask(each)))
        return list(await asyncio.gather(*tasks))


def _nobody_probes(_: OnReply) -> None:
    raise AssertionError("nothing here fails the store")


class Agent:
    def __init__(self, region: Region, connection: VirtualConnection, incarnation: StoreIncarnation) -> None:
        self.connection, self.epochs, clock, metrics = (
            connection,
            OneIncarnation(incarnation),
            region.clock,
            AgentMetrics(),
        )
        self._clock = clock
        breaker = StoreCircuitBreaker(CircuitBreaker(5, 1000), clock, metrics, _nobody_probes, 1000)
        self.batcher = batcher = CheckBatcher(Scripts(connection).checks, breaker)
        self.metrics, self.quotas, nobody = metrics, Quotas(clock), cast(Any, None)
        keeper: Any = self.epochs
        self.keys = KeyStates(clock)
        sharing = ShareLoop("agent", nobody, keeper, self.keys, nobody, metrics, clock)
        self.slices = TokenSlices(batcher, keeper, sharing, clock)
        fallback = OutageFallback(Journal(None, clock, metrics.journal, most_bytes=1, most_ms=1), metrics, clock)
        recorder = DecisionRecorder(clock, Losses(metrics.registry, clock), rows_per_second=0)
        recorder.follow(region.bundle)
        self.admission = AdmissionEngine(
            batcher, keeper, self.quotas, self.slices, sharing, fallback, metrics, clock, self.keys, recorder
        )
        self.admission.policies = Policies(region.bundle, keys=self.keys)

    async def rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def ask(self, asked: Asked) -> Said:
        at_ms = Fraction(asyncio.get_running_loop().time()) * 1000
        check = Check(subject=Subject(tenant="acme"), cost=asked.cost, mode=asked.mode)
        return Said(at_ms, asked, (await self.admission.decide(check)).answer)


def lived(
    asked: Sequence[Asked],
    limit: str,
    algorithm: str,
    *,
    slices: bool = True,
    agents: int = 1,
) -> tuple[list[Said], int]:
    """The replies, and the calls that the store had for them."""

    async def live() -> tuple[list[Said], int]:
        region = Region(loop, limit, algorithm, slices=slices)
        await region.begin(agents)
        before = sum(agent.connection.calls for agent in region.agents)
        said = await region.run(asked)
        calls = sum(agent.connection.calls for agent in region.agents) - before
        await region.end()
        return said, calls

    loop = VirtualLoop()
    try:
        return loop.run_until_complete(live())
    finally:
        loop.close()


gaps_us = st.one_of(st.integers(0, 300), st.integers(0, 3_000), st.sampled_from([50_000, 150_000, 1_000_000]))
crowds = st.lists(
    st.tuples(
        st.integers(1, 40),
        gaps_us,
        st.sampled_from([1, 1, 1, 2, 30]),
        st.sampled_from(["enforce"] * 5 + ["peek", "adjust"]),
    ),
    min_size=5,
    max_size=25,
)


def asked_by(crowd: Sequence[tuple[int, int, int, Mode]]) -> list[Asked]:
    """Requests that are alike, with a pause between them."""
    return [Asked(gap_us, cost, mode) for times, gap_us, cost, mode in crowd for _ in range(times)]


@pytest.mark.parametrize("algorithm", SLICED)
@settings(max_examples=examples(20))
@given(crowd=crowds, limit=st.sampled_from(["3/hour, burst 300", "1/second, burst 900", "1/second, burst 100"]))
def test_an_agent_alone_answers_as_if_it_had_no_slices(algorithm: str, crowd: Any, limit: str) -> None:
    # Each is answered before the next, also one that the store decides twice, with a slice returned in between.
    asked = [each._replace(after_us=max(3_000, each.after_us)) for each in asked_by(crowd)]
    sliced, plain = (lived(asked, limit, algorithm, slices=slices)[0] for slices in (True, False))
    for one, other in zip(sliced, plain, strict=True):
        assert one.answer.allowed == other.answer.allowed, one.at_ms
        for said, alone in zip(one.numbers, other.numbers, strict=True):
            assert abs(said - alone) <= 2, "but for a unit or a millisecond that has just come"


@pytest.mark.parametrize("algorithm", SLICED)
@settings(max_examples=examples(10))
@given(crowd=crowds, limit=st.sampled_from(["3/hour, burst 300", "1/hour, burst 900"]))
def test_of_many_at_once_as_many_pass(algorithm: str, crowd: Any, limit: str) -> None:
    asked = [each._replace(cost=1, mode="enforce") for each in asked_by(crowd)]
    sliced, _ = lived(asked, limit, algorithm)
    assert sum(each.answer.allowed for each in sliced) == min(len(asked), parse_rate(limit).burst)


@pytest.mark.parametrize("algorithm", SLICED)
@settings(max_examples=examples(20))
@given(crowd=crowds, limit=st.sampled_from(["100/second, burst 200", "5000/second, burst 1000", "1000/second"]))
def test_in_no_time_is_more_admitted_than_the_rate_allows(algorithm: str, crowd: Any, limit: str) -> None:
    asked = [each._replace(mode="enforce") for each in asked_by(crowd)]
    said, _ = lived(asked, limit, algorithm)
    conform(said, limit)


@pytest.mark.parametrize("cost", [1, 7, 20])
@pytest.mark.parametrize("algorithm", SLICED)
def test_nobody_is_denied_for_what_lies_here(algorithm: str, cost: int) -> None:
    """A crowd is on its way to the store when the units run out there, and the last ones are in a slice."""
    said, _ = lived([*[Asked(1_000)] * 60, *[Asked(0, cost)] * 900], "1/hour, burst 800", algorithm)
    assert sum(each.asked.cost for each in said if each.answer.allowed) == 60 + 740 // cost * cost


@pytest.mark.parametrize("algorithm", SLICED)
def test_a_slice_melts_as_its_bucket_fills(algorithm: str) -> None:
    """A slice of a hundred milliseconds' worth is taken from a full bucket; then comes a crowd for all there is."""
    warm = [Asked(5_000)] * HOT
    said, _ = lived([*warm, Asked(90_000, cost=30), *[Asked(0, cost=10)] * 120], "1000/second", algorithm)
    conform(said, "1000/second")
    admitted = sum(each.asked.cost for each in said[HOT + 1 :] if each.answer.allowed)
    assert 970 - 10 <= admitted <= 970, "and hardly less"


def conform(said: Sequence[Said], limit: str) -> None:
    """The burst and what the rate brings, in any time, but for the millisecond that an agent's clock counts in."""
    rate = parse_rate(limit)
    rate_micro, burst = Fraction(rate.rate_micro), rate.burst
    admitted = [(each.at_ms, each.asked.cost) for each in said if each.answer.allowed]
    full = Fraction(burst)
    level, before_ms = full, Fraction(0)
    for at_ms, cost in admitted:
        level = min(full, level + (at_ms - before_ms) * rate_micro / 1_000_000_000)
        level, before_ms = level - cost, at_ms
        assert level >= -rate_micro / 1_000_000_000, at_ms


@pytest.mark.parametrize("algorithm", SLICED)
def test_a_hot_key_costs_the_store_next_to_nothing(algorithm: str) -> None:
    asked = [Asked(50)] * 20_000  # for a second
    said, calls = lived(asked, "100000/second", algorithm)
    assert all(each.answer.allowed for each in said)
    assert calls <= 0.01 * len(asked)


def test_a_key_that_is_not_hot_is_left_to_the_store() -> None:
    """Too few requests in an incarnation of a slice: it would not pay."""
    asked = [Asked(LIFETIME_MS * 1_000 // (HOT - 2))] * 200
    _, calls = lived(asked, "100000/second", "token_bucket")
    assert calls == len(asked)


@pytest.mark.parametrize("is_asked_later", [False, True])
def test_what_was_asked_by_limits_that_have_changed_takes_no_slice(*, is_asked_later: bool) -> None:
    loop = VirtualLoop()

    async def lies_here() -> int:
        region = Region(loop, "1/hour, burst 800", "gcra", slices=True)
        await region.begin(1)
        [agent] = region.agents
        crowd = asyncio.create_task(region.run([Asked(0)] * 60))
        await asyncio.sleep(0)  # it is asked now, and told later
        agent.slices.return_all()
        await crowd
        if is_asked_later:
            await region.run([Asked(2_000), *[Asked(0)] * 60])
        await asyncio.sleep(0.01)
        units = agent.slices.units_here(QUOTA)
        await region.end()
        return units

    try:
        assert (loop.run_until_complete(lies_here()) > 0) == is_asked_later
    finally:
        loop.close()


@pytest.mark.parametrize("algorithm", SLICED)
def test_what_is_not_used_goes_back_for_the_others(algorithm: str) -> None:
    """A crowd at one agent ends; a moment later another agent finds all that is left, to the unit."""
    crowd = [Asked(20)] * 100
    others = [Asked(3 * LIFETIME_MS * 1_000, cost=700, agent=1), Asked(0, agent=1)]
    said, _ = lived([*crowd, *others], "1/hour, burst 800", algorithm, agents=2)
    assert [each.answer.allowed for each in said] == [True] * 101 + [False]


@pytest.mark.parametrize("algorithm", SLICED)
def test_several_agents_admit_no_more_and_little_less(algorithm: str) -> None:
    """Agents admit less than the burst by what lies in slices of other agents."""
    chance = random.Random(7)
    asked = [Asked(chance.choice([0, 10, 100]), agent=chance.randrange(3)) for _ in range(6_000)]
    said, _ = lived(asked, "1/hour, burst 4000", algorithm, agents=3)
    conform(said, "1/hour, burst 4000")
    admitted = sum(each.answer.allowed for each in said)
    assert admitted == 4_000, "and by the end all of it has gone back"
    first_denied = next(place for place, each in enumerate(said) if not each.answer.allowed)
    assert first_denied >= 4_000 - 2 * 4_000 // MAX_SHARE
