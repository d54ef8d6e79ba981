"""Apply exchanges in one transaction, committed before the reply leaves.

    lock     lanes, with what is in force; the pools that exchanges need; the leases in them
    decide   on what is locked: `rules/decision.py`
    write    one statement for what nearly every exchange writes, and one for each rare thing

The decisions are made by `rules`, the SQL is in `statements`. Here is their order. What is in force is read before the
pools are locked, since it says which: it may change meanwhile, so its version is read again with the leases.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import NamedTuple

import msgspec

from coordinator.database.connection import Connection
from coordinator.database.notify import notify
from coordinator.epochs.rules.lost_ledger import may_keep_another
from coordinator.exchange.budgets import Budgets, without_limits
from coordinator.exchange.late_usage import lock_late_usage
from coordinator.exchange.rules.balances import Key
from coordinator.exchange.rules.decision import Decided, DecidedExchange, decide
from coordinator.exchange.rules.granting import LeaseTerms
from coordinator.exchange.rules.label_sets import reported_label_sets, sets_with_room, with_other_labels
from coordinator.exchange.rules.locked import (
    Bounds,
    Locked,
    LockedPool,
    bounds_of,
    divided_keys,
    divisions_of,
    keys_without_pool,
    limits_of,
    lock,
    moved_keys,
    needed_pools,
    pools_to_lock,
    possible_overages,
    pushable_quotas,
    reporting_epochs,
    waiting_epochs,
    without_held,
)
from coordinator.exchange.rules.posting import Report
from coordinator.exchange.rules.replies import Receipts, epochs_with_data_loss, replayed_reports, respond
from coordinator.exchange.rules.settlement import QuarantineReason
from coordinator.exchange.rules.submissions import (
    ExchangeCall,
    Matched,
    classify,
    confirm_callers,
    hold_implausible_reports,
    keep_within_budgets,
    match_wants,
    regional_quotas,
    replays_in_ended_epochs,
    wanted_quotas,
    with_granted,
)
from coordinator.exchange.statements.balances import insert_leases, write_booked, write_corrections
from coordinator.exchange.statements.label_sets import count_label_sets, insert_label_sets, read_known_label_sets
from coordinator.exchange.statements.lanes import (
    LaneName,
    LockedLanes,
    lock_lanes_and_read_catalogue,
    read_receipts,
    share_current_epochs,
)
from coordinator.exchange.statements.leases import read_granted_keys, read_leases_and_version
from coordinator.exchange.statements.pools import lock_pools, read_known_periods, read_overages, read_unseen_quotas
from coordinator.exchange.statements.quarantine import EvidenceRow, insert_quarantine, read_kept_batches
from coordinator.limits.in_force import Documents
from coordinator.limits.read_catalogue import confirm_catalogue, read_catalogue
from coordinator.limits.rules.entitlement import Catalogue
from coordinator.notice import Notice
from coordinator.rebalancing.moves import read_moves, write_moves
from coordinator.webhooks.outbox import enqueue
from protocol.messages import ExchangeResponse


class Applied(NamedTuple):
    """The answer to one call, and what the metrics count."""

    response: ExchangeResponse
    reports: Sequence[Report]
    quarantined: int
    notices: Sequence[Notice]
    lost: Sequence[int]  # epochs that are over, for their store lost data: see `fence_lost`
    is_authentic: bool = True  # False if the call's credentials were revoked: then nothing of it was looked at


class _Context(NamedTuple):
    """The connection, rules and time that all steps of one transaction share."""

    connection: Connection
    documents: Documents
    terms: LeaseTerms
    budgets: Budgets
    now: datetime

    async def catalogue(self, quotas: set[str]) -> Catalogue:
        return await read_catalogue(self.connection, self.documents, quotas, self.now)


async def apply_exchanges(
    connection: Connection,
    documents: Documents,
    calls: Sequence[ExchangeCall],
    terms: LeaseTerms,
    now: datetime,
    budgets: Budgets | None = None,
) -> list[Applied]:
    """Apply several calls, no lane in two of them. Each has its own answer."""
    context = _Context(connection, documents, terms, budgets or without_limits(), now)
    locked_lanes, catalogue, quotas = await _lock_lanes(context, calls)
    calls = confirm_callers(calls, locked_lanes.valid)
    matched = match_wants(classify(calls, locked_lanes.lanes), catalogue, terms, now)
    matched = with_granted(matched, await read_granted_keys(connection, replays_in_ended_epochs(matched)))
    matched, pools = await _lock_pools(context, matched)
    locked, catalogue = await _lock_leases(context, matched, pools, catalogue, quotas)
    bounds = await _read_bounds(context, locked, catalogue, quotas)
    decided = decide(locked, bounds, terms, now)
    receipts = await _write(context, decided)
    return list(_answers(context, calls, decided, locked, catalogue, receipts))


# --- lock -------------------------------------------------------------------------------------------------------------


async def _lock_lanes(context: _Context, calls: Sequence[ExchangeCall]) -> tuple[LockedLanes, Catalogue, set[str]]:
    """Return also the catalogue of all quota keys that the calls are about, and these keys."""
    names = [LaneName(each.batch.epoch, each.batch.lane, call.region) for call in calls for each in call.submissions]
    quotas, tokens = wanted_quotas(calls), {call.token_hash for call in calls if call.token_hash}
    identities = {name for call in calls for name in call.names}
    locked = await lock_lanes_and_read_catalogue(
        context.connection, context.documents, names, quotas, tokens, identities, context.now
    )
    catalogue = locked.catalogue
    if more := regional_quotas(calls, catalogue) - quotas:
        quotas |= more
        catalogue = await context.catalogue(quotas)
    return locked, catalogue, quotas


async def _lock_pools(context: _Context, exchanges: list[Matched]) -> tuple[list[Matched], dict[Key, LockedPool]]:
    """Lock the pools that exist, and make those that are wanted or that a plausible report needs."""
    connection, now = context.connection, context.now
    pools = await lock_pools(connection, pools_to_lock(exchanges, now), ())
    wanted, reported = keys_without_pool(exchanges, pools)
    known_periods = set[str]()
    if reported:
        in_force = await context.catalogue({key.quota for key in reported})
        known_periods = await read_known_periods(connection, {key.period for key in reported})
        exchanges = hold_implausible_reports(exchanges, reported, in_force, known_periods, context.terms, now)
    if wanted or reported:
        unseen = await read_unseen_quotas(connection, {key.quota for key in wanted | reported})
        new_periods = {key.period for key in reported} - known_periods
        exchanges = keep_within_budgets(exchanges, unseen, new_periods, context.budgets.take)
    pools = without_held(exchanges, pools)
    if missing := needed_pools(exchanges) - pools.keys():
        pools |= await lock_pools(connection, missing, missing)
    return await _bound_labels(connection, exchanges), pools


async def _bound_labels(connection: Connection, exchanges: list[Matched]) -> list[Matched]:
    """Bound the sets of labels of each pool that is locked. Usage without labels reads and writes nothing here."""
    reported = reported_label_sets(exchanges)
    if not reported:
        return exchanges
    told_apart = await read_known_label_sets(connection, reported)
    if unknown := [each for each in reported if each not in told_apart]:
        added = sets_with_room(unknown, await count_label_sets(connection, unknown))
        await insert_label_sets(connection, added)
        told_apart.update(added)
    return with_other_labels(exchanges, told_apart)


async def _lock_leases(
    context: _Context,
    exchanges: list[Matched],
    pools: Mapping[Key, LockedPool],
    catalogue: Catalogue,
    quotas: set[str],
) -> tuple[Locked, Catalogue]:
    """Read the leases behind the locks, and confirm that the catalogue still decides the same."""
    connection, now = context.connection, context.now
    epochs = reporting_epochs(exchanges)
    pools, corrections = await lock_late_usage(connection, pools, epochs, now)
    divisions = divisions_of(catalogue, pools, await read_moves(connection, moved_keys(pools)))
    divided = divided_keys(divisions, catalogue.quotas)
    leases, version = await read_leases_and_version(connection, pools.keys(), epochs, divided)
    locked = lock(exchanges, pools, leases, corrections, divisions, catalogue.quotas, now)
    if version is not None:
        catalogue = await confirm_catalogue(connection, context.documents, catalogue, version, quotas, now)
    return locked, catalogue


async def _read_bounds(context: _Context, locked: Locked, catalogue: Catalogue, quotas: set[str]) -> Bounds:
    """Read how far the decision may go: what may be pushed to regions that wait, and what may become overage.

    A region that returns units mostly wants some as well: then the limit is known already.
    """
    pushable = await share_current_epochs(context.connection, waiting_epochs(locked, context.now))
    overages = possible_overages(locked)
    about = pushable_quotas(locked, pushable) | {each.key.quota for each in overages}
    if about - quotas:
        catalogue = await context.catalogue(about)
    limits = limits_of(catalogue, about)
    used = await read_overages(context.connection, overages)
    return bounds_of(locked, pushable, used, limits, context.terms.claims)


# --- write ------------------------------------------------------------------------------------------------------------


async def _write(context: _Context, decided: Decided) -> Receipts:
    """Write what was decided, and return the receipts. Only the database can fail from here on."""
    connection, now = context.connection, context.now
    await insert_quarantine(connection, await _new_regressed_batches(context, decided), now)
    receipts: Receipts = {}
    if decided.booked:
        await insert_leases(connection, decided.new_leases, decided.states)
        await write_corrections(connection, decided.corrections)
        await write_moves(connection, decided.moves)
        receipts = await write_booked(
            connection, decided.booked, decided.pools, decided.leases, decided.states, decided.entries, now
        )
        await insert_quarantine(connection, list(_kept_evidence(context, decided)), now)
        await enqueue(connection, decided.events, now)
        await notify(connection, decided.notices)
    return {**receipts, **await read_receipts(connection, replayed_reports(decided.exchanges))}


async def _new_regressed_batches(context: _Context, decided: Decided) -> list[EvidenceRow]:
    """Return batches that show a regressed ledger, to be kept whole, each number of a lane once.

    A batch is offered again and again until people have seen to it: one beyond its region's budget is kept later.
    """
    known = await read_kept_batches(context.connection, [each.batch for each in decided.regressed])
    rows = []
    for region, batch, *_ in decided.regressed:
        kept = known.get((batch.epoch, batch.lane), {})
        is_new = batch.seq not in kept and may_keep_another(kept.values(), context.now)
        if is_new and context.budgets.may_keep(region, batch):
            evidence = msgspec.json.encode(batch).decode()
            place = batch.epoch, batch.lane, batch.seq
            rows.append(EvidenceRow(*place, "", "", QuarantineReason.LEDGER_REGRESSED, evidence))
    return rows


def _kept_evidence(context: _Context, decided: Decided) -> Iterator[EvidenceRow]:
    """Yield what is kept of the evidence that was not booked, as far as its region's budgets allow."""
    for report, *_, quarantined in decided.booked:
        for key, reason, evidence in quarantined:
            if (kept := context.budgets.kept_of(report.region, evidence)) is not None:
                yield EvidenceRow(report.epoch, report.lane, report.seq, *key, reason, kept)


def _answers(
    context: _Context,
    calls: Sequence[ExchangeCall],
    decided: Decided,
    locked: Locked,
    catalogue: Catalogue,
    receipts: Receipts,
) -> Iterator[Applied]:
    exchanges, notices = iter(decided.exchanges), decided.notices
    for call in calls:
        own: list[DecidedExchange] = list(islice(exchanges, len(call.submissions)))
        booked = [each.booked for each in own if each.booked]
        yield Applied(
            respond(call, own, locked, catalogue, receipts, context.terms, context.now),
            [each.report for each in booked],
            sum(len(each.quarantined) for each in booked),
            notices,
            epochs_with_data_loss(own),
            call.is_authentic,
        )
        notices = ()  # they belong to all calls, and are counted once
