"""What an agent does with the coordinator's reply: settle the leases in the store, and act on each outcome."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from protocol.messages import ExchangeReply, ExchangeResponse, LeaseReply, Versions
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from regional_agent.leasing.epoch import EpochManager
from regional_agent.leasing.lane_faults import FrozenLane, LaneFaults
from regional_agent.leasing.pacing import Pacing
from regional_agent.leasing.quotas import Quotas
from regional_agent.leasing.rules.lanes import Lanes
from regional_agent.metrics import AgentMetrics
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import StoreIncarnation

# A batch may be dropped once the coordinator has booked it, now or before, or has kept it for people to judge.
ACKNOWLEDGED = {ExchangeOutcome.APPLIED, ExchangeOutcome.REPLAYED, ExchangeOutcome.RETIRED}
# A lease with such a refusal will not grow any more, but what there is may be spent.
SPENDABLE = (None, GrantRefusal.EXHAUSTED, GrantRefusal.TOTAL_TOO_LARGE)
RENEWED_WITHIN_MS = 45_000  # an idle lease: what is left of its time then has to outlast an outage
DRAINED_CHECK_MS = 1_000  # how often a drained region asks whether it is active again


class Settlement:
    def __init__(
        self,
        scripts: Scripts,
        quotas: Quotas,
        epochs: EpochManager,
        lanes: Lanes,
        faults: LaneFaults,
        pacing: Pacing,
        metrics: AgentMetrics,
    ) -> None:
        self._scripts = scripts
        self._quotas = quotas
        self._epochs = epochs
        self._lanes = lanes
        self._faults = faults
        self._pacing = pacing
        self._metrics = metrics
        self.on_versions: Callable[[Versions], None] = lambda _: None

    async def settle_response(
        self,
        incarnation: StoreIncarnation,
        frozen_lanes: Sequence[FrozenLane],
        response: ExchangeResponse,
        sent_ms: int,
    ) -> None:
        for frozen, reply in zip(frozen_lanes, response.replies, strict=False):  # in the order of the request
            await self._settle(incarnation, frozen, reply, sent_ms)
        self.on_versions(response.versions)
        self._pacing.check_region_in(DRAINED_CHECK_MS if response.drain else None)
        if response.drain:
            await self.return_everything(incarnation)
        self._quotas.contact.is_draining = response.drain  # from now on nothing of what was leased is admitted

    async def _settle(
        self, incarnation: StoreIncarnation, frozen: FrozenLane, reply: ExchangeReply, sent_ms: int
    ) -> None:
        self._metrics.exchanges.labels(reply.outcome.value).inc()
        if reply.outcome in ACKNOWLEDGED:
            await self._acknowledge(incarnation, frozen, reply, sent_ms)
        elif reply.outcome is ExchangeOutcome.REFUSED:
            self._faults.refuse_for_fault(incarnation, frozen, reply.fault)
        elif reply.outcome is ExchangeOutcome.WRONG_FINGERPRINT:
            # From or to an incarnation that is over. What was not booked stays in the store and is sent again.
            self._epochs.on_wrong_fingerprint(incarnation)
        elif reply.outcome is not ExchangeOutcome.STALE:
            self._faults.refuse(incarnation, frozen, reply.outcome, reply.expected_seq)
        elif await self._scripts.frozen_seq(incarnation, frozen.lane) == frozen.batch.seq:
            # No other agent had it booked meanwhile: the store itself is behind. It has forgotten what it reported.
            self._faults.refuse(incarnation, frozen, ExchangeOutcome.STORE_REGRESSED)

    async def _acknowledge(
        self, incarnation: StoreIncarnation, frozen: FrozenLane, reply: ExchangeReply, sent_ms: int
    ) -> None:
        gained = await self._scripts.settle(incarnation, frozen.lane, frozen.batch.mono_us, reply)
        self._lanes.unacknowledged.discard(frozen.lane)
        self._faults.resume(incarnation, frozen.lane)
        if frozen.batch.has_more:
            self._pacing.report_now()
        if _closes_epoch(reply):
            self._epochs.on_epoch_closed(incarnation)
        self._apply_grants(answered_quotas(reply, frozen.requested, gained), reply, gained)
        for quota, leases in _by_quota(reply.leases).items():
            in_ms = next_renewal_ms(leases)
            self._quotas.schedule_renewal(quota, None if in_ms is None else sent_ms + in_ms)
        for lease in reply.leases:
            if lease.recall_keep is not None and not lease.starts_in_ms:
                await self.answer_recall(incarnation, lease.quota, lease.recall_keep, lease.period)

    def _apply_grants(self, answered: Sequence[str], reply: ExchangeReply, gained: dict[str, int]) -> None:
        self._quotas.apply_reply(answered, reply, gained)
        for each in reply.refused:
            if each.refusal is GrantRefusal.INVALID:
                self._faults.set_quota_aside(each.quota, each.reason or each.refusal.value)

    async def answer_recall(
        self, incarnation: StoreIncarnation, quota: str, keep: int, period: str | None = None
    ) -> None:
        """Return idle units of a lease that a signal or a reply recalled. The next exchange reports them at once."""
        if self._quotas.return_surplus_later(quota):
            return
        if await self._scripts.return_units(incarnation, quota, keep, period=period):
            self._pacing.report_now()

    async def return_everything(self, incarnation: StoreIncarnation) -> int:
        """Return all idle units of all leases to the ledger. Return how many they were."""
        leased = await self._scripts.leased_quotas(incarnation)
        return sum([await self._scripts.return_units(incarnation, quota, 0, ahead=True) for quota in leased])


def answered_quotas(reply: ExchangeReply, requested: Sequence[str], gained: Mapping[str, int]) -> Sequence[str]:
    """Return the requested quotas that a reply answers.

    A replay grants nothing, so its requests stay open; except for what was granted when the first reply was lost.
    """
    return (
        requested if reply.outcome is ExchangeOutcome.APPLIED else [quota for quota in requested if gained.get(quota)]
    )


def next_renewal_ms(leases: Sequence[LeaseReply]) -> int | None:
    """Return when to renew a quota's leases, counted from the request that these answer, or None.

    They are renewed half-way to where one ends with nothing after it, and within RENEWED_WITHIN_MS, so that an idle
    lease outlasts an outage as well. What is over or has nothing left is not renewed.
    """
    good = [lease for lease in leases if not lease.final and lease.refusal in SPENDABLE]
    continued = {lease.starts_in_ms for lease in good if lease.starts_in_ms}
    ends = {lease.ends_in_ms if lease.refusal else min(lease.expires_in_ms, 2 * RENEWED_WITHIN_MS) for lease in good}
    ends -= continued
    return min(ends) // 2 if ends else None


def _closes_epoch(reply: ExchangeReply) -> bool:
    """Return whether the epoch gets nothing any more: another was opened for its region, or it was retired."""
    refusals = {lease.refusal for lease in reply.leases} | {want.refusal for want in reply.refused}
    return reply.outcome is ExchangeOutcome.RETIRED or GrantRefusal.EPOCH_FENCED in refusals


def _by_quota(leases: Iterable[LeaseReply]) -> dict[str, list[LeaseReply]]:
    by_quota: dict[str, list[LeaseReply]] = defaultdict(list)
    for lease in leases:
        by_quota[lease.quota].append(lease)
    return by_quota
