"""One call of a region's agent: several lanes, one transaction, committed before the reply leaves.

    lock and read   lanes, what is in force, pools, leases: a few statements for all lanes together; with the leases
                    comes the version of what is in force, for that may have changed before the pools were locked
    decide          rules/stages.py, on what is locked: who booked what, who gets what, who is told what
    write           one statement for what nearly all of them write, and one for each rare thing

Only the SQL and its order are here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from coordinator.database.connection import Connection
from coordinator.database.notify import notify
from coordinator.epochs.rules.lost_ledger import is_kept
from coordinator.exchange.budgets import Budgets, without_limits
from coordinator.exchange.late_usage import lock_late_usage
from coordinator.exchange.rules.balances import Entry, Key, Report
from coordinator.exchange.rules.granting import Terms
from coordinator.exchange.rules.settlement import QuarantineReason
from coordinator.exchange.rules.stages import (
    BookedReport,
    Books,
    Call,
    Decision,
    LockedPool,
    Receipts,
    Work,
    apart,
    asked_about,
    books_of,
    bound_overages,
    decide,
    divided_keys,
    divisions_of,
    epochs_about,
    hold_reports,
    judge,
    keep_within_budgets,
    keys_without_pool,
    limits_of,
    lost,
    moved_keys,
    overages_in_question,
    pools_about,
    pools_needed,
    pushed_of,
    replayed,
    respond,
    sort,
    waiting_epochs,
    without_held,
    works_of,
)
from coordinator.exchange.statements.balances import insert_leases, write_booked, write_corrections
from coordinator.exchange.statements.lanes import (
    LaneName,
    lock_lanes_and_read_catalogue,
    read_receipts,
    share_current_epochs,
)
from coordinator.exchange.statements.leases import read_leases_and_version
from coordinator.exchange.statements.pools import lock_pools, read_known_periods, read_overages, read_unseen_quotas
from coordinator.exchange.statements.quarantine import KeptEvidence, insert_quarantine, read_kept_batches
from coordinator.limits.in_force import Documents
from coordinator.limits.read_catalogue import confirm_catalogue, read_catalogue
from coordinator.limits.rules.entitlement import Catalogue
from coordinator.notice import Notice
from coordinator.rebalancing.moves import read_moves, write_moves
from coordinator.webhooks.outbox import tell
from coordinator.webhooks.rules import suspense_events
from protocol.messages import ExchangeResponse, Receipt


class Applied(NamedTuple):
    """The answer to one call, and what the metrics want to know of it."""

    response: ExchangeResponse
    reports: Sequence[Report]
    quarantined: int
    notices: Sequence[Notice]
    lost: Sequence[int]  # epochs that are over, for their store lost data: see `fence_lost`


async def apply_exchange(
    connection: Connection,
    documents: Documents,
    call: Call,
    terms: Terms,
    now: datetime,
    budgets: Budgets | None = None,
) -> Applied:
    (applied,) = await apply_exchanges(connection, documents, [call], terms, now, budgets)
    return applied


async def apply_exchanges(
    connection: Connection,
    documents: Documents,
    calls: Sequence[Call],
    terms: Terms,
    now: datetime,
    budgets: Budgets | None = None,
) -> list[Applied]:
    """Several calls in one transaction, no lane in two of them; each has its own answer."""
    budgets = budgets or without_limits()
    by_call = [works_of(call) for call in calls]
    works = [work for each in by_call for work in each]
    catalogue = await _lock_lanes_and_read_catalogue(connection, documents, works, terms, now)
    pools = await _lock_pools(connection, documents, works, terms, budgets, now)
    books, version = await _lock_books(connection, works, pools, catalogue, now)
    if version is not None:
        asked = asked_about(works) | apart(works, catalogue)
        catalogue = await confirm_catalogue(connection, documents, catalogue, version, asked, now)
    books.limits = await _limits(connection, documents, works, books, catalogue, terms, now)
    decision = decide(works, books, terms, now)
    receipts = await _write(connection, decision, budgets, now) | await read_receipts(connection, replayed(works))
    booked = {(each.report.epoch, each.report.lane): each for each in decision.booked}
    applied = [
        _applied(call, works, books, catalogue, receipts, booked, terms, now)
        for call, works in zip(calls, by_call, strict=True)
    ]
    return [applied[0]._replace(notices=decision.notices), *applied[1:]]  # they belong to all, and count once


def _applied(
    call: Call,
    works: Sequence[Work],
    books: Books,
    catalogue: Catalogue,
    receipts: Receipts,
    booked: Mapping[tuple[int, int], BookedReport],
    terms: Terms,
    now: datetime,
) -> Applied:
    own = [booked[work.report.epoch, work.report.lane] for work in works if work.is_booked]
    return Applied(
        respond(call, works, books, catalogue, receipts, terms, now),
        [each.report for each in own],
        sum(len(each.quarantined) for each in own),
        (),
        lost(works),
    )


async def _lock_lanes_and_read_catalogue(
    connection: Connection, documents: Documents, works: Sequence[Work], terms: Terms, now: datetime
) -> Catalogue:
    names = [LaneName(work.report.epoch, work.report.lane, work.report.region) for work in works]
    asked = asked_about(works)
    lanes, catalogue = await lock_lanes_and_read_catalogue(connection, documents, names, asked, now)
    judge(works, lanes)
    if more := apart(works, catalogue) - asked:
        catalogue = await read_catalogue(connection, documents, asked | more, now)
    sort(works, catalogue, terms, now)
    return catalogue


async def _lock_pools(
    connection: Connection,
    documents: Documents,
    works: Sequence[Work],
    terms: Terms,
    budgets: Budgets,
    now: datetime,
) -> dict[Key, LockedPool]:
    """Lock the pools that there are, and make those that are wanted or that a plausible report needs."""
    pools = await lock_pools(connection, pools_about(works, now), ())
    wanted, reported = keys_without_pool(works, pools)
    known_periods = set[str]()
    if reported:
        in_force = await read_catalogue(connection, documents, {key.quota for key in reported}, now)
        known_periods = await read_known_periods(connection, {key.period for key in reported})
        hold_reports(works, reported, in_force, known_periods, terms, now)
    if wanted or reported:
        unseen = await read_unseen_quotas(connection, {key.quota for key in wanted | reported})
        new_periods = {key.period for key in reported} - known_periods
        keep_within_budgets(works, unseen, new_periods, budgets.take)
    needed = pools_needed(works)
    pools = without_held(works, pools)
    if missing := needed - pools.keys():
        pools |= await lock_pools(connection, missing, missing)
    return pools


async def _lock_books(
    connection: Connection, works: Sequence[Work], pools: Mapping[Key, LockedPool], catalogue: Catalogue, now: datetime
) -> tuple[Books, int | None]:
    """Return also the catalogue's version behind the locks, unless nothing was locked."""
    epochs = epochs_about(works)
    pools, corrections = await lock_late_usage(connection, pools, epochs, now)
    divisions = divisions_of(catalogue, pools, await read_moves(connection, moved_keys(pools)))
    divided = divided_keys(divisions, catalogue.quotas)
    leases, version = await read_leases_and_version(connection, pools.keys(), epochs, divided)
    books = books_of(works, pools, leases, corrections, divisions, catalogue.quotas, now)
    books.pushable = await share_current_epochs(connection, waiting_epochs(works, books, now))
    return books, version


async def _limits(
    connection: Connection,
    documents: Documents,
    works: Sequence[Work],
    books: Books,
    catalogue: Catalogue,
    terms: Terms,
    now: datetime,
) -> Mapping[str, int]:
    """Return the limits of what may be pushed, and bound what may become overage.

    A region that returns units mostly wants some as well: then the limit was read before.
    """
    overages = overages_in_question(works)
    about = pushed_of(books) | {overage.key.quota for overage in overages}
    if about - asked_about(works):
        catalogue = await read_catalogue(connection, documents, about, now)
    limits = limits_of(catalogue, about)
    bound_overages(books, await read_overages(connection, overages), limits, terms.claims)
    return limits


async def _write(
    connection: Connection, decision: Decision, budgets: Budgets, now: datetime
) -> dict[tuple[int, int], Receipt]:
    """Everything is decided: from here on only the database can fail, and then nothing was."""
    booked = decision.booked
    await _keep_regressed(connection, decision, budgets, now)
    if not booked:
        return {}
    await insert_leases(connection, decision.new_leases, decision.states)
    await write_corrections(connection, decision.corrections)
    await write_moves(connection, decision.moves)
    entries: list[Entry] = [*(each.report for each in booked), *decision.pushed]
    receipts = await write_booked(connection, booked, decision.pools, decision.leases, decision.states, entries, now)
    await insert_quarantine(connection, list(_kept_evidence(booked, budgets)), now)
    await tell(connection, [*suspense_events(entries), *decision.events], now)
    await notify(connection, decision.notices)
    return receipts


def _kept_evidence(booked: Iterable[BookedReport], budgets: Budgets) -> Iterator[KeptEvidence]:
    """Return what is kept of the evidence that was not booked, as far as its region's budgets allow."""
    for report, *_, quarantined in booked:
        for key, reason, evidence in quarantined:
            kept = budgets.kept_of(report.region, evidence)
            if kept is not None:
                yield KeptEvidence(report.epoch, report.lane, report.seq, *key, reason, kept)


async def _keep_regressed(connection: Connection, decision: Decision, budgets: Budgets, now: datetime) -> None:
    """Keep batches whole that show a regressed ledger, each number of a lane once.

    A batch is offered again and again until people have seen to it: one beyond its region's budget is kept later.
    """
    kept = await read_kept_batches(connection, decision.regressed)
    rows = []
    for batch in decision.regressed:
        known = kept.get((batch.epoch, batch.lane), {})
        is_new = batch.seq not in known and is_kept(known.values(), now)
        if is_new and budgets.may_keep(decision.regions[batch.epoch], batch):
            evidence = msgspec.json.encode(batch).decode()
            place = batch.epoch, batch.lane, batch.seq
            rows.append(KeptEvidence(*place, "", "", QuarantineReason.LEDGER_REGRESSED, evidence))
    await insert_quarantine(connection, rows, now)
