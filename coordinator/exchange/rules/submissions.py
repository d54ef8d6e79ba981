"""What a region submits, on its way to a decision: parsed, classified by its number, matched with the limits in force.

    Submission   one exchange of a request, parsed
    Classified   its lane is locked: whether it counts, by its number and bytes; which keys belong to its lane
    Matched      the catalogue is read: its demands, which of them are refused, and which pools it needs

Each is a value made by one function from the one before. An exchange that is refused (a gap, a conflict, lost data, …)
changes nothing and delays none of the others.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import NamedTuple

from coordinator.exchange.rules.balances import Key
from coordinator.exchange.rules.budget import Budget, Take
from coordinator.exchange.rules.granting import (
    FindEntitledPeriod,
    GrantRequest,
    LeaseTerms,
    find_entitled_period,
    make_grant_requests,
)
from coordinator.exchange.rules.plausibility import reason_to_hold
from coordinator.exchange.rules.settlement import (
    EpochState,
    Lane,
    QuarantineReason,
    SettlementVerdict,
    is_empty,
    judge_number,
    key_of,
)
from coordinator.limits.rules.entitlement import Catalogue
from protocol.identifiers import lane_of
from protocol.limits.document import Mode
from protocol.messages import ExchangeFault, ExchangeReply, FrozenBatch, ItemRefused, LeaseDemand
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from protocol.traces.trace_context import TraceContext

LONGEST_REASON = 256


class Submission(NamedTuple):
    """One exchange of a region's request, parsed."""

    batch: FrozenBatch
    body_hash: bytes
    demands: Sequence[LeaseDemand]
    refused: Sequence[ItemRefused] = ()  # malformed demands


class ExchangeCall(NamedTuple):
    """One request of a region's agent, parsed."""

    region: str
    fingerprint: str
    submissions: Sequence[Submission]
    refused: Sequence[tuple[int, ExchangeReply]] = ()  # exchanges that are malformed, by their place in the request
    token_hash: bytes | None = None  # of a token that the transaction has to confirm
    names: Sequence[str] = ()  # in its client certificate, which the transaction has to confirm as well
    is_authentic: bool = True
    cause: TraceContext | None = None  # of a sampled request that the exchange is about


class ValidCredentials(NamedTuple):
    """The credentials of some calls that the database knows as valid."""

    tokens: Collection[bytes]
    regions: Mapping[str, str]  # by their identities


def confirm_callers(calls: Iterable[ExchangeCall], valid: ValidCredentials) -> list[ExchangeCall]:
    """Return the calls, without the exchanges of those whose credentials are not valid any more."""
    return [
        call if _is_authentic(call, valid) else call._replace(submissions=(), refused=(), is_authentic=False)
        for call in calls
    ]


def _is_authentic(call: ExchangeCall, valid: ValidCredentials) -> bool:
    """Return whether the token is valid, and a certificate is of no other region. Without a token it is of this one."""
    regions = {valid.regions[name] for name in call.names if name in valid.regions}
    if call.token_hash is not None:
        return call.token_hash in valid.tokens and regions <= {call.region}
    return not call.names or regions == {call.region}


class Classified(NamedTuple):
    """A submission whose lane is locked."""

    region: str
    batch: FrozenBatch
    body_hash: bytes
    lane: Lane | None  # None if it was not issued to the region
    verdict: SettlementVerdict
    demands: Sequence[LeaseDemand]  # those that belong to its lane
    refused: Sequence[ItemRefused]


class Matched(NamedTuple):
    """An exchange whose demands are matched with the limits in force, so that its pools are known."""

    exchange: Classified
    requests: Sequence[GrantRequest]
    refused: Sequence[ItemRefused]
    keys: Sequence[Key]  # the pools it is about, each once
    new_keys: Sequence[Key]  # pools and leases that must exist from now on
    current_keys: Collection[Key]  # those of the periods that wanted quotas are in now
    held: Mapping[Key, QuarantineReason]  # reports that wait for people, without a lease

    @property
    def epoch(self) -> int:
        return self.exchange.batch.epoch

    @property
    def is_applied(self) -> bool:
        return self.exchange.verdict.is_applied

    @property
    def is_answered(self) -> bool:
        return self.exchange.verdict.is_answered


def wanted_quotas(calls: Iterable[ExchangeCall]) -> set[str]:
    """Return the quota keys whose limits the decision takes."""
    return {want.quota for call in calls for submission in call.submissions for want in submission.demands}


def regional_quotas(calls: Iterable[ExchangeCall], catalogue: Catalogue) -> set[str]:
    """Return the reported quota keys of which each region has a limit of its own: their limit is part of the reply."""
    reported = {lease.quota for call in calls for submission in call.submissions for lease in submission.batch.leases}
    return {quota for quota in reported if catalogue.mode_of(quota) is Mode.REGIONAL}


# --- classify ---------------------------------------------------------------------------------------------------------


def classify(calls: Iterable[ExchangeCall], lanes: Mapping[tuple[int, int], Lane]) -> list[Classified]:
    """Judge exchanges by their numbers and bytes, and refuse what belongs to another lane."""
    return [_classify(call, submission, lanes) for call in calls for submission in call.submissions]


def _classify(call: ExchangeCall, submission: Submission, lanes: Mapping[tuple[int, int], Lane]) -> Classified:
    batch, body_hash, demands, refused = submission
    lane = lanes.get((batch.epoch, batch.lane))
    verdict = judge_number(lane, call.fingerprint, batch.seq, body_hash)
    if lane is not None:
        verdict = _refuse_foreign_lease(batch, lane) or verdict
        own_lanes = [lane_of(want.quota, lane.lanes) for want in demands]
        foreign = [(want.quota, own) for want, own in zip(demands, own_lanes, strict=True) if own != lane.lane]
        demands = [want for want, own in zip(demands, own_lanes, strict=True) if own == lane.lane]
        refused = [*refused, *(_refuse_foreign_want(*each) for each in foreign)]
    return Classified(call.region, batch, body_hash, lane, verdict, demands, refused)


def _refuse_foreign_lease(batch: FrozenBatch, lane: Lane) -> SettlementVerdict | None:
    """Refuse a whole batch for one lease of another lane: a batch is one hash."""
    for place, lease in enumerate(batch.leases):
        if (own := lane_of(lease.quota, lane.lanes)) != lane.lane:
            fault = ExchangeFault(field=f"frozen.leases[{place}].quota", rule="lane", reason=_belongs(lease.quota, own))
            return SettlementVerdict(ExchangeOutcome.REFUSED, fault=fault)
    return None


def _refuse_foreign_want(quota: str, lane: int) -> ItemRefused:
    return ItemRefused(quota=quota, refusal=GrantRefusal.INVALID, rule="lane", reason=_belongs(quota, lane))


def _belongs(quota: str, lane: int) -> str:
    return f"{quota} belongs to lane {lane}"[:LONGEST_REASON]


# --- match ------------------------------------------------------------------------------------------------------------


def match_wants(
    exchanges: Iterable[Classified], catalogue: Catalogue, terms: LeaseTerms, now: datetime
) -> list[Matched]:
    """Match demands with the limits in force, and find the pools that each exchange needs."""
    entitled = cache(lambda quota: find_entitled_period(catalogue, quota, terms, now))  # many want the same quota
    return [_match(each, catalogue, entitled) for each in exchanges]


def _match(exchange: Classified, catalogue: Catalogue, entitled: FindEntitledPeriod) -> Matched:
    requests: Sequence[GrantRequest] = ()
    refused: list[ItemRefused] = []
    if exchange.verdict.is_answered:
        if exchange.lane and exchange.lane.epoch_state is not EpochState.CURRENT:
            refused = _refuse_all(exchange.demands, GrantRefusal.EPOCH_FENCED)
        elif not catalogue.is_active(exchange.region):
            # Answered, and not left out: requests that wait for it would wait in vain.
            refused = _refuse_all(exchange.demands, GrantRefusal.REGION_NOT_ACTIVE)
        else:
            requests, refused = make_grant_requests(exchange.demands, entitled)
    return _with_keys(exchange, requests, [*exchange.refused, *refused])


def _refuse_all(demands: Iterable[LeaseDemand], refusal: GrantRefusal) -> list[ItemRefused]:
    return [ItemRefused(quota=want.quota, refusal=refusal) for want in demands]


def _with_keys(exchange: Classified, requests: Sequence[GrantRequest], refused: Sequence[ItemRefused]) -> Matched:
    reported, wanted = exchange.batch.leases, [request.key for request in requests]
    new_keys: Sequence[Key] = ()
    if exchange.verdict.is_applied:
        # A region may have consumed what it was never granted: usage that happened is never refused.
        used = [key_of(lease) for lease in reported if not is_empty(lease)]
        new_keys = list(dict.fromkeys([*wanted, *used]))
    keys = list(dict.fromkeys([*map(key_of, reported), *wanted]))
    current_keys = {request.key for request in requests if not request.is_ahead}
    return Matched(exchange, requests, refused, keys, new_keys, current_keys, {})


# --- replays in epochs that are over ----------------------------------------------------------------------------------


def replays_in_ended_epochs(exchanges: Iterable[Matched]) -> list[FrozenBatch]:
    """Return the batches that were booked before, of epochs that are over and lost no data.

    No agent requests anything in such an epoch. So a replay names no lease that the store did not have when it made the
    batch, though one may have been granted in the first reply. If the store lost data, its returns are not booked.
    """
    replays = (each.exchange for each in exchanges if each.exchange.verdict.outcome is ExchangeOutcome.REPLAYED)
    return [each.batch for each in replays if each.lane and _has_ended_whole(each.lane)]


def _has_ended_whole(lane: Lane) -> bool:
    return lane.epoch_state is not EpochState.CURRENT and not lane.lost_data


def with_granted(exchanges: list[Matched], granted: Mapping[tuple[int, int], Collection[Key]]) -> list[Matched]:
    """Let replays name these leases as well. `granted`: by epoch and lane; keys of other lanes are left out."""
    return [_with_granted(each, granted) for each in exchanges] if granted else exchanges


def _with_granted(each: Matched, granted: Mapping[tuple[int, int], Collection[Key]]) -> Matched:
    lane = each.exchange.lane
    if lane is None or (lane.epoch, lane.lane) not in granted:
        return each
    own = [key for key in granted[lane.epoch, lane.lane] if lane_of(key.quota, lane.lanes) == lane.lane]
    return each._replace(keys=list(dict.fromkeys([*each.keys, *own])))


# --- reports and demands that are not plausible, or beyond a budget ---------------------------------------------------


def hold_implausible_reports(
    exchanges: Iterable[Matched],
    reported: Iterable[Key],
    catalogue: Catalogue,
    known_periods: Collection[str],
    terms: LeaseTerms,
    now: datetime,
) -> list[Matched]:
    """Keep reports for people that name no quota or no period that they can be booked on."""
    held = {
        key: reason
        for key in reported
        if (reason := reason_to_hold(catalogue, key, known_periods, terms.late_days, now))
    }
    return [_hold(each, held) for each in exchanges] if held else list(exchanges)


def keep_within_budgets(
    exchanges: list[Matched], unseen: Collection[str], new_periods: Collection[str], take: Take
) -> list[Matched]:
    """Refuse demands, and keep reports for people, that would make more new keys or periods than their region may.

    `unseen`: the quota keys that have no pool in any period. `new_periods`: those that are not in the ledger.
    """
    by_region: dict[str, list[Matched]] = defaultdict(list)
    for each in exchanges:
        by_region[each.exchange.region].append(each)
    beyond = {region: _beyond_budget(region, own, unseen, new_periods, take) for region, own in by_region.items()}
    return [_refuse_beyond_budget(each, beyond[each.exchange.region]) for each in exchanges]


class _BeyondBudget(NamedTuple):
    """The quotas and reports of one region that are beyond its budget now."""

    quotas: Collection[str]  # that are wanted
    reports: Collection[Key]


def _beyond_budget(
    region: str, own: Sequence[Matched], unseen: Collection[str], new_periods: Collection[str], take: Take
) -> _BeyondBudget:
    wanted = {request.key.quota for each in own for request in each.requests}
    keys = list(dict.fromkeys(key for each in own for key in each.new_keys))
    reported = [key for key in keys if key.quota not in wanted]
    periods = list(dict.fromkeys(key.period for key in reported if key.period in new_periods))
    no_periods = set(periods[take(region, Budget.NEW_PERIODS, len(periods)) :])
    quotas = list(dict.fromkeys(key.quota for key in keys if key.quota in unseen))
    no_quotas = set(quotas[take(region, Budget.NEW_KEYS, len(quotas)) :])
    held = {key for key in reported if key.quota in no_quotas or key.period in no_periods}
    return _BeyondBudget(no_quotas & wanted, held)


def _refuse_beyond_budget(each: Matched, beyond: _BeyondBudget) -> Matched:
    refused = dict.fromkeys(request.key.quota for request in each.requests if request.key.quota in beyond.quotas)
    if refused:
        reason = "the region has wanted too many new keys in this minute"
        refusals = [ItemRefused(quota=quota, refusal=GrantRefusal.OVER_BUDGET, reason=reason) for quota in refused]
        requests = [request for request in each.requests if request.key.quota not in refused]
        each = _hold(_with_keys(each.exchange, requests, [*each.refused, *refusals]), each.held)
    return _hold(each, dict.fromkeys(beyond.reports, QuarantineReason.OVER_BUDGET)) if beyond.reports else each


def _hold(each: Matched, held: Mapping[Key, QuarantineReason]) -> Matched:
    """Keep these reports for people: no pool and no lease is locked or made for them."""
    own = {key: held[key] for key in each.new_keys if key in held}
    if not own:
        return each
    return each._replace(
        keys=[key for key in each.keys if key not in own],
        new_keys=[key for key in each.new_keys if key not in own],
        held={**each.held, **own},
    )
