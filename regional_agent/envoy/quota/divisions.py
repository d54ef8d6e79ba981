"""Divide each rate that proxies report among them: at every tick divide, send what changed, and pay the store.

While the store does not answer, nothing is refreshed: assignments expire, and proxies do what their configuration says.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

import structlog
from msgspec.structs import replace

from protocol.clock import Clock
from protocol.limits.rates import Rate
from regional_agent.agent import RegionalAgent
from regional_agent.cluster.cell import Cell
from regional_agent.envoy.quota.planning import RateOfBucket
from regional_agent.envoy.quota.proxies import Bucket, Proxies, Proxy
from regional_agent.envoy.quota.rules import (
    IDLE_MS,
    NANO_UNITS,
    NOTHING,
    REFRESH_MS,
    TICK_MS,
    Assignment,
    Division,
    Share,
    bound_nano,
)
from regional_agent.store.connection import StoreError, StoreUnavailable
from regional_agent.store.types import AgentRateDemand, Fenced, Outcome, RateCharge, StoreDecision

log = structlog.get_logger()

AGENTS_EVERY_MS = 1_000  # how often agents of a region compare their demands
LEAST_DEMAND = 16  # an agent with proxies counts as if it demanded this part of the share
MOST_IN_CALL = 250
ANSWERED_MS = 1_000  # without an answer of the store for so long, nothing is assigned


class DividedRate:
    """One rate: its division, and the store that counts it."""

    def __init__(self, rate: RateOfBucket, cell: Cell, now_ms: int) -> None:
        self.charge = rate.charge
        self.limit = rate.policy_charge.limit
        self.state = rate.policy_charge.state
        self.cell = cell
        self.division: Division[Bucket] = Division(Share(0, self.charge.burst, 0), now_ms)
        self.answered_ms = 0  # when the store took a payment last; 0: never
        self.region_part = (1, 1)  # this agent's demand, and that of all agents of the region
        self.demand_rest = 0
        self.is_paying = False

    def follow(self, rate: RateOfBucket) -> None:
        """Use the terms of the newest limits document."""
        self.charge, self.limit, self.state = rate.charge, rate.policy_charge.limit, rate.policy_charge.state

    def own_demand_micro(self, now_ms: int) -> int:
        self.division.checks_micro = self.state.demand.per_second_milli(now_ms) * 1000
        demand_micro = self.division.demand_micro(now_ms) + self.division.checks_micro
        return max(demand_micro, self.division.share.rate_micro // LEAST_DEMAND, 1)

    def is_answered(self, now_ms: int) -> bool:
        return bool(self.answered_ms) and now_ms < self.answered_ms + ANSWERED_MS

    @property
    def bound_nano(self) -> int:
        """Return what proxies may admit beyond share and burst: the share may be the whole limit."""
        proxies = len({bucket.proxy.name for bucket in self.division.parts})
        limit_micro = max(int(self.charge.rate_micro), self.division.share.rate_micro)
        return bound_nano(limit_micro, self.charge.burst, proxies)


class Divisions:
    def __init__(self, region: RegionalAgent, proxies: Proxies, clock: Clock) -> None:
        self._region = region
        self._proxies = proxies
        self._clock = clock
        self._wake = asyncio.Event()
        self._most_overshoot = 0.0
        self.rates: dict[str, DividedRate] = {}

    def most_overshoot(self) -> float:
        """Return the highest overshoot so far as a part of its bound."""
        found = (each.division.most_debt_nano / max(1, each.bound_nano) for each in self.rates.values())
        self._most_overshoot = max(self._most_overshoot, *found, 0.0)
        return self._most_overshoot

    # --- buckets ------------------------------------------------------------------------------------------------------

    def report(self, bucket: Bucket, allowed: int, denied: int, elapsed_s: int, now_ms: int) -> None:
        for rate in bucket.plan.rates:
            divided = self._rate(rate, now_ms)
            requested = (allowed + denied) * rate.cost
            divided.division.report(bucket, allowed * rate.cost, requested, elapsed_s, now_ms)

    def follow(self, bucket: Bucket, now_ms: int) -> None:
        """Use the terms of a new plan with the same rates."""
        for rate in bucket.plan.rates:
            self._rate(rate, now_ms)

    def hasten(self) -> None:
        """Divide at once: a bucket has no assignment."""
        self._wake.set()

    def leave(self, bucket: Bucket, now_ms: int) -> None:
        for rate in bucket.plan.rates:
            if rate.charge.quota in self.rates:
                self.rates[rate.charge.quota].division.leave(bucket, now_ms)

    def _rate(self, rate: RateOfBucket, now_ms: int) -> DividedRate:
        divided = self.rates.get(rate.charge.quota)
        if divided is None:
            cell = self._region.cell_of(rate.charge.quota)
            divided = self.rates[rate.charge.quota] = DividedRate(rate, cell, now_ms)
        elif divided.charge is not rate.charge:
            divided.follow(rate)
        return divided

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        compare = asyncio.create_task(self._compare_agents())
        try:
            while True:
                self.tick(self._clock.monotonic_ms())
                await asyncio.sleep(TICK_MS / 2000)  # an unassigned bucket waits no longer than half a tick
                try:
                    async with asyncio.timeout(TICK_MS / 2000):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
        finally:
            compare.cancel()

    def tick(self, now_ms: int) -> None:
        self._divide(now_ms)
        for proxy in self._proxies:
            self._refresh(proxy, now_ms)
        for divided in list(self.rates.values()):
            self._pay(divided, now_ms)
            if not divided.division.parts:
                del self.rates[divided.charge.quota]

    def _divide(self, now_ms: int) -> None:
        """Divide all rates. A bucket that several of them limit gets the smallest part, and lends what is beyond it."""
        targets: dict[Bucket, list[tuple[DividedRate, RateOfBucket, Assignment]]] = {}
        for divided in self.rates.values():
            own, region = divided.region_part
            divided.division.agent_micro = divided.division.share.rate_micro * own // region
            if divided.is_answered(now_ms):
                for bucket, assignment in divided.division.divide(now_ms).items():
                    rate = next(each for each in bucket.plan.rates if each.charge.quota == divided.charge.quota)
                    targets.setdefault(bucket, []).append((divided, rate, assignment))
        for bucket, parts in targets.items():
            if len(parts) == len(bucket.plan.rates) and bucket.proxy.is_connected:
                self._assign(bucket, parts, now_ms)

    def _assign(
        self, bucket: Bucket, parts: Sequence[tuple[DividedRate, RateOfBucket, Assignment]], now_ms: int
    ) -> None:
        requests = [Assignment(part.rate_micro // rate.cost, part.tokens // rate.cost) for _, rate, part in parts]
        least = Assignment(min(each.rate_micro for each in requests), max(1, min(each.tokens for each in requests)))
        least = least if least.rate_micro else NOTHING
        is_due = least != bucket.sent or now_ms >= bucket.proxy.refreshed_ms + REFRESH_MS
        for divided, rate, _ in parts:
            if len(parts) > 1:
                others = [
                    each.rate_micro for each, (other, _, _) in zip(requests, parts, strict=True) if other is not divided
                ]
                divided.division.parts[bucket].ceiling_micro = min(others) * rate.cost * 9 // 8 + 1
            if is_due:
                assigned = Assignment(least.rate_micro * rate.cost, least.tokens * rate.cost)
                divided.division.assign(bucket, assigned, now_ms)
        if is_due:
            bucket.proxy.send(bucket, least, now_ms)

    def _refresh(self, proxy: Proxy, now_ms: int) -> None:
        """Refresh blanket rules, abandon what is idle, and forget a proxy that does not return."""
        is_due = now_ms >= proxy.refreshed_ms + REFRESH_MS
        if is_due:
            proxy.refreshed_ms = now_ms
        if not proxy.is_connected:
            if all(not self._has_part(bucket) for bucket in proxy.buckets.values()):
                self._proxies.forget(proxy)
            return
        for bucket in list(proxy.buckets.values()):
            if now_ms >= bucket.requested_ms + IDLE_MS:
                self.leave(bucket, now_ms)
                del proxy.buckets[bucket.id]
                proxy.send(bucket, None, now_ms)
            elif not bucket.plan.rates and (is_due or bucket.sent != bucket.plan.blanket):
                proxy.send(bucket, bucket.plan.blanket, now_ms)

    def _has_part(self, bucket: Bucket) -> bool:
        return any(
            rate.charge.quota in self.rates and bucket in self.rates[rate.charge.quota].division.parts
            for rate in bucket.plan.rates
        )

    # --- the store ----------------------------------------------------------------------------------------------------

    def _pay(self, divided: DividedRate, now_ms: int) -> None:
        """Take what is due from the store. The answer tells the share, and what is in the bucket."""
        if divided.is_paying:
            return
        self._note_demand(divided, now_ms)
        units = divided.division.payment(now_ms)
        divided.is_paying = True
        charge = replace(divided.charge, cost=units)
        if not divided.cell.admission.adjust_rate(charge, partial(self._on_paid, divided, charge)):
            self._on_refused(divided, units)

    def _on_paid(self, divided: DividedRate, charge: RateCharge, outcome: Outcome) -> None:
        if not isinstance(outcome, StoreDecision):
            self._on_refused(divided, charge.cost)
            return
        now_ms, (policy,) = self._clock.monotonic_ms(), outcome.policies
        divided.is_paying = False
        if not divided.answered_ms:
            self.hasten()
        divided.answered_ms = now_ms
        divided.division.paid(Share(policy.last_grant, charge.burst, policy.available))

    def _on_refused(self, divided: DividedRate, units: int) -> None:
        divided.is_paying = False
        divided.division.refused(units)

    def _note_demand(self, divided: DividedRate, now_ms: int) -> None:
        """Count the proxies' demand as the region's."""
        nano = divided.division.demand_micro(now_ms) * TICK_MS + divided.demand_rest
        units, divided.demand_rest = divmod(nano, NANO_UNITS)
        share = divided.division.share
        loop = divided.cell.share_loop
        loop.record_proxies(divided.state, divided.charge, units, share.level_nano, share.rate_micro, now_ms)

    # --- other agents of the region -----------------------------------------------------------------------------------

    async def _compare_agents(self) -> None:
        """Learn what part of the region's demand is this agent's: agents divide the share by that."""
        while True:
            await asyncio.sleep(AGENTS_EVERY_MS / 1000)
            for cell in self._region.cells:
                rates = [each for each in self.rates.values() if each.cell is cell]
                for begin in range(0, len(rates), MOST_IN_CALL):
                    await self._compare(cell, rates[begin : begin + MOST_IN_CALL])

    async def _compare(self, cell: Cell, rates: Sequence[DividedRate]) -> None:
        incarnation, now_ms = cell.epochs.current, self._clock.monotonic_ms()
        if incarnation is None:
            return
        demands = [
            AgentRateDemand(
                each.charge.quota,
                Rate(each.charge.rate_micro, each.charge.burst),
                each.own_demand_micro(now_ms),
                is_contended=False,
            )
            for each in rates
        ]
        try:
            found = await cell.scripts.report_rates(incarnation, self._region.settings.name, demands)
        except (Fenced, StoreUnavailable, StoreError) as error:
            log.warning("demand of proxies not compared", reason=str(error))
            return
        for each, own, report in zip(rates, demands, found.reports, strict=True):
            each.region_part = own.demand_micro, max(own.demand_micro, report.demand_micro)
