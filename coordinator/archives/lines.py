"""Read the lines of reports from archives, for what leads from a statement to its reports."""

from collections.abc import AsyncIterator, Sequence

from coordinator.archives.rules import ArchivedTransfer, transfer_row
from coordinator.archives.statements import RecordedArchive
from coordinator.archives.store import ArchiveStore
from coordinator.proof.rules import TransferRow


async def find_lines(
    store: ArchiveStore,
    archive: RecordedArchive,
    quotas: Sequence[str],
    region: str | None,
    charge_period: str,
    after: int,
) -> AsyncIterator[ArchivedTransfer]:
    """Return the lines of these quotas, in the order of their reports, of those after a position."""
    where = {"quota": quotas, "charge_period": [charge_period], "region": [region] if region else []}
    async for row in store.rows(archive.folder, "transfers", ArchivedTransfer, after, where):
        if row.position is not None and row.position > after:
            yield row


async def lines_of_reports(
    store: ArchiveStore, archive: RecordedArchive, positions: Sequence[int]
) -> dict[int, list[TransferRow]]:
    """Return all lines of reports of an archive, also those that are booked in other periods, by their positions."""
    first, last = min(positions), max(positions)
    found: dict[int, list[TransferRow]] = {position: [] for position in positions}
    for name in ("transfers", "others"):
        async for row in store.rows(archive.folder, name, ArchivedTransfer, first - 1):
            if row.position in found:
                found[row.position].append(transfer_row(row))
            elif row.position is not None and row.position > last:
                break
    for rows in found.values():
        rows.sort(key=lambda row: (row.line, row.part, row.id))
    return found
