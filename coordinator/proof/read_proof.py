"""Read an inclusion proof of a statement line, for auditors who do not trust this installation. Needs a snapshot.

The proof has each report of the line whole, as its head hashes it; for each seal that covers one of the reports, all
report entries of that seal; and all seals from the first of these to the last, each of which hashes the one before.
Movements without a report are entries of their seal. docs/guides/auditing.md has the few lines of code that check it.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID

from msgspec import Struct, structs
from sqlalchemy import BigInteger, Integer, select

from coordinator.archives.lines import lines_of_reports
from coordinator.archives.refusal import Archived
from coordinator.archives.statements import hold_archives, read_archives_of
from coordinator.archives.store import ArchiveStore, ArchiveUnreadable
from coordinator.database.compiled import compiled, parameter
from coordinator.database.connection import Connection
from coordinator.database.tables import transfer
from coordinator.http.pagination import PageLinks
from coordinator.proof.rules import TransferRow, billed_row, genesis_head, microseconds, plain
from coordinator.proof.seal import movement_entries, report_entries, seal_of
from coordinator.usage.read_statement import UNREAD, LineSource, NoStatement, read_sources
from coordinator.usage.rules.statement import LineKind, StatementId

MOST_SEALS = 20_000  # two weeks, with one seal a minute


class ProvenLine(Struct, frozen=True):
    """The line that is proven."""

    period: str
    tenant: str
    kind: LineKind
    quota: str
    charge_period: str
    region: str | None
    units: int
    adjustment: UUID | None  # the movement of the line


class ProvenReport(Struct, frozen=True):
    """`head` is the SHA-256 of `previous` and, as JSON, of all other fields but `position` and `head`."""

    position: int
    previous: str
    head: str
    region: str
    epoch: int
    lane: int
    seq: int
    body_hash: str
    recorded_at: int  # in microseconds since 1970, like all times of a proof
    billed: list[list[Any]]


class ProvenSeal(Struct, frozen=True):
    """`hash` is the SHA-256 of `sealed`, as JSON. Entries are included if the line is from one of them."""

    hash: str
    sealed: list[Any]
    reports: list[list[Any]] | None
    movements: list[list[Any]] | None


class LineProof(Struct, frozen=True):
    """The proof for a part of the line's reports; all parts together make up its units."""

    line: ProvenLine
    reports: list[ProvenReport]
    movements: list[int]  # transfers without a report
    seals: list[ProvenSeal]
    page: PageLinks


class ProofPart(NamedTuple):
    line: ProvenLine
    reports: list[ProvenReport]
    movements: list[int]
    seals: list[ProvenSeal]
    numbers: list[str]


class TooManySeals(NamedTuple):
    """There are too many seals between the first report of the part and its last."""

    seals: int


class BillsNothing(NamedTuple):
    """The line is a credit or a debit: it bills nothing that could be proven."""

    path: str


class NoSuchSeal(NamedTuple):
    reason: str


async def read_proof(
    connection: Connection,
    store: ArchiveStore | None,
    of: StatementId,
    n: int,
    as_of: int | datetime | None,
    after: str,
    count: int,
    last_seal: int | None,
) -> ProofPart | NoStatement | Archived | TooManySeals | BillsNothing | NoSuchSeal | None:
    """Prove the next `count` reports of a line, with all seals up to `last_seal`; None if there is no such line."""
    await hold_archives(connection)
    if last_seal is not None and (missing := await _without_seal(connection, last_seal)):
        return missing
    found = await read_sources(connection, store, of, n, as_of, after, count + 1)
    if found is None or isinstance(found, NoStatement | Archived):
        return found
    line, adjustment = found.line, found.line.adjustment
    if adjustment and not line.units:
        return BillsNothing(adjustment.path)
    sources, numbers = found.sources[:count], found.numbers
    movements = [int(number.partition(".")[2]) for number in numbers[:count] if number.startswith("1.")]
    positions = [source.position for source in sources if source.position is not None]
    reports = [await _report(connection, source) for source in sources if source.seq is not None]
    if lacking := await _lacking(connection, reports):
        lines = await _archived_lines(connection, store, lacking)
        if isinstance(lines, Archived):
            return lines
        reports = [structs.replace(report, billed=lines.get(report.position, report.billed)) for report in reports]
    rows = await connection.fetch(_SEALS, positions, movements, last_seal)
    if len(rows) > MOST_SEALS:
        return TooManySeals(len(rows))
    seals = [await _seal(connection, *pair, positions, movements) for pair in _with_the_one_before(rows)]
    movement = adjustment.id if adjustment else None
    claimed = ProvenLine(*of, line.kind, line.quota, line.charge_period, line.region, line.units, movement)
    return ProofPart(claimed, reports, movements, seals, numbers)


async def _without_seal(connection: Connection, number: int) -> NoSuchSeal | None:
    newest = await connection.fetchval("SELECT max(number) FROM seal")
    if newest is None:
        return NoSuchSeal("nothing is sealed yet")
    return None if 1 <= number <= newest else NoSuchSeal(f"they are numbered from 1 to {newest}")


async def _lacking(connection: Connection, reports: Sequence[ProvenReport]) -> list[int]:
    """Return the positions of reports whose transfers are not all in the database."""
    there = {report.position: len(report.billed) for report in reports}
    rows = await connection.fetch(_LINES, [*there])
    return [row["position"] for row in rows if there[row["position"]] < row["lines"]]


async def _archived_lines(
    connection: Connection, store: ArchiveStore | None, positions: Sequence[int]
) -> Mapping[int, list[list[Any]]] | Archived:
    """Return all lines of reports that have some in archives. Each archive has its reports whole."""
    found: dict[int, list[list[Any]]] = {}
    for archive in await read_archives_of(connection, min(positions), max(positions)):
        if store is None:
            return Archived(archive, UNREAD)
        try:
            lines = await lines_of_reports(store, archive, positions)
        except ArchiveUnreadable as error:
            return Archived(archive, str(error))
        found |= {position: [*map(billed_row, rows)] for position, rows in lines.items() if rows}
    return found


async def _report(connection: Connection, source: LineSource) -> ProvenReport:
    row = await connection.fetchrow(_REPORT, source.epoch, source.lane, source.seq)
    assert row is not None
    assert source.epoch is not None
    assert source.lane is not None
    statement = _TRANSFERS.with_values(epoch=source.epoch, lane=source.lane, seq=source.seq)
    transfers = [TransferRow._make(each) for each in await connection.fetch(*statement)]
    return ProvenReport(
        row["position"],
        (row["previous"] or genesis_head(source.epoch, source.lane)).hex(),
        row["head"].hex(),
        row["region"],
        source.epoch,
        source.lane,
        row["seq"],
        row["body_hash"].hex(),
        microseconds(row["recorded_at"]),
        [billed_row(transfer) for transfer in transfers],
    )


def _with_the_one_before(rows: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pair each row with the one before it. The first row only says where the next one begins."""
    is_before = bool(rows) and rows[0]["number"] < rows[0]["first"]
    return list(pairwise(rows if is_before else [None, *rows]))


async def _seal(
    connection: Connection, before: Any, row: Any, positions: Sequence[int], movements: Sequence[int]
) -> ProvenSeal:
    seal = seal_of(row)
    position, transfer = (before["position"], before["transfer"]) if before else (0, 0)
    has_report = any(position < each <= seal.position for each in positions)
    has_movement = any(transfer < each <= seal.transfer for each in movements)
    return ProvenSeal(
        row["hash"].hex(),
        [plain(value) for value in seal],
        await _listed(report_entries(connection, position, seal.position)) if has_report else None,
        await _listed(movement_entries(connection, transfer, seal.transfer)) if has_movement else None,
    )


async def _listed(entries: AsyncIterator[list[object]]) -> list[list[Any]]:
    return [[plain(value) for value in entry] async for entry in entries]


_REPORT = """
SELECT report.*, region_epoch.region, before.head AS previous
FROM report JOIN region_epoch USING (epoch) LEFT JOIN report AS before
    ON (before.epoch, before.lane, before.seq) = (report.epoch, report.lane, report.seq - 1)
WHERE report.epoch = $1 AND report.lane = $2 AND report.seq = $3
"""
_LINES = "SELECT position, lines FROM report WHERE position = ANY ($1::bigint[])"
_TRANSFERS = compiled(
    select(*(transfer.c[name] for name in TransferRow._fields))
    .where(
        transfer.c.epoch == parameter("epoch", BigInteger),
        transfer.c.lane == parameter("lane", Integer),
        transfer.c.seq == parameter("seq", BigInteger),
    )
    .order_by(transfer.c.line, transfer.c.part, transfer.c.id)
)
# From the seal before the first needed one to the last.
_SEALS = """
WITH needed AS (
    SELECT min(number) AS first, greatest(max(number), $3::bigint) AS last FROM (
        SELECT (SELECT min(number) FROM seal WHERE position >= at) AS number FROM unnest($1::bigint[]) AS at
        UNION ALL
        SELECT (SELECT min(number) FROM seal WHERE transfer >= at) FROM unnest($2::bigint[]) AS at) AS of_each
)
SELECT seal.*, needed.first FROM seal, needed WHERE number BETWEEN first - 1 AND last ORDER BY number
"""
