"""One call of a region's agent: several lanes, one transaction, committed before the reply leaves.

    lock and read   lanes, what is in force, pools, leases: a few statements for all lanes together; with the leases
                    comes the version of what is in force, for that may have changed before the pools were locked
    decide          rules/stages.py, on what is locked: who booked what, who gets what, who is told what
    write           one statement for what nearly all of them write, and one for each rare thing

Only the SQL and its order are here.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from coordinator.database.connection import Connection
from coordinator.database.notify import notify
from coordinator.exchange import statements as exchange_statements
from coordinator.exchange.budgets import Budgets, without_limits
from coordinator.exchange.rules.balances import Entry, Key, Report
from coordinator.exchange.rules.granting import Terms
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
from coordinator.exchange.statements import LaneName
from coordinator.limits.in_force import Documents
from coordinator.limits.rules.entitlement import Catalogue
from coordinator.notice import Notice
from coordinator.rebalancing.moves import read_moves, write_moves
from coordinator.webhooks.outbox import tell
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
        catalogue = await exchange_statements.confirm_catalogue(connection, documents, catalogue, version, asked, now)
    books.limits = await _limits(connection, documents, works, books, catalogue, terms, now)
    decision = decide(works, books, terms, now)
    receipts = await _write(connection, decision, budgets, now) | await exchange_statements.read_receipts(
        connection, replayed(works)
    )
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
    lanes, catalogue = await exchange_statements.lock_lanes_and_read_catalogue(connection, documents, names, asked, now)
    judge(works, lanes)
    if more := apart(works, catalogue) - asked:
        catalogue = await exchange_statements.read_catalogue(connection, documents, asked | more, now)
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
    pools = await exchange_statements.lock_pools(connection, pools_about(works, now), ())
    wanted, reported = keys_without_pool(works, pools)
    known_periods = set[str]()
    if reported:
        in_force = await exchange_statements.read_catalogue(connection, documents, {key.quota for key in reported}, now)
        known_periods = await exchange_statements.read_known_periods(connection, {key.period for key in reported})
        hold_reports(works, reported, in_force, known_periods, terms, now)
    if wanted or reported:
        unseen = await exchange_statements.read_unseen(connection, {key.quota for key in wanted | reported})
        new_periods = {key.period for key in reported} - known_periods
        keep_within_budgets(works, unseen, new_periods, budgets.take)
    needed = pools_needed(works)
    pools = without_held(works, pools)
    if missing := needed - pools.keys():
        pools |= await exchange_statements.lock_pools(connection, missing, missing)
    return pools


async def _lock_books(
    connection: Connection, works: Sequence[Work], pools: Mapping[Key, LockedPool], catalogue: Catalogue, now: datetime
) -> tuple[Books, int | None]:
    """Return also the catalogue's version behind the locks, unless nothing was locked."""
    epochs = epochs_about(works)
    pools, corrections = await exchange_statements.lock_late(connection, pools, epochs, now)
    divisions = divisions_of(catalogue, pools, await read_moves(connection, moved_keys(pools)))
    divided = divided_keys(divisions, catalogue.quotas)
    leases, version = await exchange_statements.read_leases_and_version(connection, pools.keys(), epochs, divided)
    books = books_of(works, pools, leases, corrections, divisions, catalogue.quotas, now)
    books.pushable = await exchange_statements.share_current_epochs(connection, waiting_epochs(works, books, now))
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
        catalogue = await exchange_statements.read_catalogue(connection, documents, about, now)
    limits = limits_of(catalogue, about)
    bound_overages(books, await exchange_statements.read_overages(connection, overages), limits, terms.claims)
    return limits


async def _write(
    connection: Connection, decision: Decision, budgets: Budgets, now: datetime
) -> dict[tuple[int, int], Receipt]:
    """Everything is decided: from here on only the database can fail, and then nothing was."""
    booked = decision.booked
    regions = decision.regions
    await exchange_statements.keep_regressed(
        connection, decision.regressed, now, lambda batch: budgets.may_keep(regions[batch.epoch], batch)
    )
    if not booked:
        return {}
    await exchange_statements.insert_leases(connection, decision.new_leases, decision.states)
    await exchange_statements.write_corrections(connection, decision.corrections)
    await write_moves(connection, decision.moves)
    entries: list[Entry] = [*(each.report for each in booked), *decision.pushed]
    receipts = await exchange_statements.write_booked(
        connection, booked, decision.pools, decision.leases, decision.states, entries, now
    )
    await exchange_statements.write_quarantine(connection, booked, now, budgets.kept_of)
    await tell(connection, decision.events, now)
    await notify(connection, decision.notices)
    return receipts
