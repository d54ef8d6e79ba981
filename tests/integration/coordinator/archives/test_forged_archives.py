"""Each way of forging an archive is found, also where the forger writes a manifest that fits."""

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from coordinator.archives.check import ArchiveVerification, check_archive
from coordinator.archives.rules import (
    FILES,
    MANIFEST,
    ArchivedFile,
    ArchivedSeal,
    encoded_manifest,
    parse_manifest,
    transfer_row,
)
from coordinator.archives.store import ArchiveStore
from coordinator.proof.rules import Digest, FaultKind, KeptSeal, billed_row, genesis_head, microseconds, seal_hash
from tests.conftest import PostgresServer, copied
from tests.integration.coordinator.archives.conftest import SECOND_DAY, archivist_on
from tests.integration.coordinator.proof.history import NOVEMBER

pytestmark = pytest.mark.anyio
Rows = list[dict[str, Any]]


@pytest.fixture(scope="session")
def archives(
    postgres_server: PostgresServer, closed_template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Yield a directory with an archive of a month, and one of a day whose report has lines of another month."""
    place = tmp_path_factory.mktemp("archives")
    with copied(postgres_server, closed_template) as url:
        asyncio.run(_archive(url, place))
        yield place


async def _archive(url: str, place: Path) -> None:
    async with archivist_on(url, str(place)) as archivist:
        for found in await archivist.archive(NOVEMBER, SECOND_DAY):
            assert found["state"] == "archived", found


class Forged:
    """A copy of an archive, and what a forger does to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.parquet"

    def rows(self, name: str) -> Rows:
        return [dict(row) for row in pyarrow.parquet.read_table(self.path(name)).to_pylist()]

    def write(self, name: str, rows: Rows) -> None:
        schema = pyarrow.parquet.read_schema(self.path(name))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), self.path(name))

    def change(self, name: str, change: Callable[[Rows], object]) -> None:
        rows = self.rows(name)
        change(rows)
        self.write(name, rows)

    def fit_manifest(self) -> None:
        """Write a manifest that has the hashes and counts of the files as they are."""
        manifest = parse_manifest((self.folder / MANIFEST).read_bytes())
        files = {}
        for name in FILES:
            content, rows = self.path(name).read_bytes(), pyarrow.parquet.read_metadata(self.path(name)).num_rows
            files[name] = ArchivedFile(rows, len(content), hashlib.sha256(content).hexdigest())
        digest = Digest()
        for row in self.rows("transfers"):
            digest.add(list(row.values())[1:])
        seals = self.rows("seals")
        changed = {
            "files": files,
            "transfers_sha256": digest.value.hex(),
            "seal_hash": seals[-1]["hash"].hex(),
            "seals": msgspec.structs.replace(manifest.seals, last=seals[-1]["number"]),
        }
        (self.folder / MANIFEST).write_bytes(encoded_manifest(msgspec.structs.replace(manifest, **changed)))

    async def check(self, kept: list[KeptSeal], recorded: bytes | None = None) -> ArchiveVerification:
        return await check_archive(ArchiveStore(str(self.folder)), "", recorded, kept)


@pytest.fixture
def forged(archives: Path, tmp_path: Path) -> Forged:
    shutil.copytree(archives / NOVEMBER / "1", tmp_path / "forged")
    return Forged(tmp_path / "forged")


# --- files ------------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


FILE_FORGERIES: dict[str, Callable[[Forged], object]] = {
    **{f"{name}_edited": (lambda forged, name=name: flip(forged.path(name))) for name in FILES},  # type: ignore[misc]
    **{f"{name}_removed": (lambda forged, name=name: forged.path(name).unlink()) for name in FILES},  # type: ignore[misc]
    "truncated": lambda forged: forged.path("transfers").write_bytes(forged.path("transfers").read_bytes()[:-1]),
    "added": lambda forged: (forged.folder / "more.parquet").write_bytes(b"x"),
    "manifest_removed": lambda forged: (forged.folder / MANIFEST).unlink(),
    "manifest_edited": lambda forged: flip(forged.folder / MANIFEST),
    "replaced": lambda forged: shutil.copy(forged.path("others"), forged.path("transfers")),
}


@pytest.mark.parametrize("forgery", FILE_FORGERIES)
async def test_a_changed_file_is_found(forged: Forged, forgery: str) -> None:
    recorded = hashlib.sha256((forged.folder / MANIFEST).read_bytes()).digest()
    assert (await forged.check([], recorded)).intact
    FILE_FORGERIES[forgery](forged)
    found = await forged.check([], recorded)
    assert found.fault is not None
    assert found.fault.kind is FaultKind.ARCHIVE_CHANGED


# --- rows, with a manifest that fits ----------------------------------------------------------------------------------


def used(rows: Rows) -> dict[str, Any]:
    return next(row for row in rows if row["dst"] == "consumed")


def edit_units(rows: Rows) -> None:
    used(rows)["units"] += 100


def move_to_another_minute(rows: Rows) -> None:
    row = used(rows)
    row["window_at"] = row["window_at"].replace(second=30)


def add_a_line(rows: Rows) -> None:
    rows.append(rows[-1] | {"line": rows[-1]["line"] + 1, "id": rows[-1]["id"] + 1})


def add_lines_of_no_report(rows: Rows) -> None:
    rows.insert(0, rows[0] | {"position": rows[0]["position"] - 1})


def edit_a_head(rows: Rows) -> None:
    rows[1]["head"] = bytes(32)


def rename_the_region(rows: Rows) -> None:
    rows[0]["region"] = "ap-south"


def edit_a_balance(rows: Rows) -> None:
    rows[-1]["balances"] = rows[-1]["balances"].replace('"consumed": ', '"consumed": 1')


def cut_the_last_report(forged: Forged) -> None:
    last = forged.rows("reports")[-1]["position"]
    for name in ("reports", "transfers", "others"):
        forged.change(name, lambda rows: _keep(rows, lambda row: row["position"] != last))


def _keep(rows: Rows, condition: Callable[[dict[str, Any]], bool]) -> None:
    rows[:] = [row for row in rows if condition(row)]


def recompute_a_head(forged: Forged) -> None:
    """Edit the last report that a line of usage came in, and hash it again: its lane's end moves."""
    reports, lines = forged.rows("reports"), forged.rows("transfers")
    line = next(row for row in reversed(lines) if row["dst"] == "consumed")
    line["units"] += 100
    report = next(row for row in reports if row["position"] == line["position"])
    own = [row for row in [*lines, *forged.rows("others")] if row["position"] == line["position"]]
    report["head"] = hashed_again(report, own)
    forged.write("reports", reports)
    forged.write("transfers", lines)


def recompute_heads(forged: Forged) -> None:
    recompute_a_head(forged)
    heads = {row["position"]: row["head"] for row in forged.rows("reports")}
    forged.change("heads", lambda rows: [row.update(head=heads.get(row["position"], row["head"])) for row in rows])


def recompute_seals(forged: Forged) -> None:
    """Hash all seals again, over heads that were recomputed. Only a kept seal tells."""
    recompute_heads(forged)
    heads, seals, previous = forged.rows("heads"), forged.rows("seals"), None
    begins = seals[0]["position"] - seals[0]["reports"]
    for row in seals:
        digest = Digest()
        for head in heads:
            if begins < head["position"] <= row["position"]:
                digest.add(list(head.values()))
        begins = row["position"]
        balances = msgspec.json.decode(row["balances"])
        if NOVEMBER in balances and row is max((s for s in seals if NOVEMBER in s["balances"]), key=seals.index):
            balances[NOVEMBER]["consumed"] += 100
            balances[NOVEMBER]["outstanding"] = balances[NOVEMBER].get("outstanding", 0) - 100
        row |= {"reports_hash": digest.value, "previous": previous or row["previous"]}
        row["balances"] = msgspec.json.encode(balances).decode()
        row["hash"] = previous = seal_hash(ArchivedSeal(**row).seal)
    forged.write("seals", seals)


def hashed_again(report: dict[str, Any], lines: Rows) -> bytes:
    rows = sorted(
        (transfer_row(FILES["transfers"](**row)) for row in lines),  # type: ignore[arg-type]
        key=lambda row: (row.line, row.part, row.id),
    )
    billed = [billed_row(row) for row in rows]
    place = report["region"], report["epoch"], report["lane"], report["seq"]
    covered = [*place, report["body_hash"].hex(), microseconds(report["recorded_at"]), billed]
    previous = report["previous"] or genesis_head(report["epoch"], report["lane"])
    return hashlib.sha256(previous + msgspec.json.encode(covered, order="sorted")).digest()


class Case(NamedTuple):
    forge: Callable[[Forged], object]
    kinds: tuple[FaultKind, ...]


def changing(name: str, change: Callable[[Rows], object], *kinds: FaultKind) -> Case:
    return Case(lambda forged: forged.change(name, change), kinds)


ROW_FORGERIES = {
    "units": changing("transfers", edit_units, FaultKind.REPORT_CHANGED),
    "minute": changing("transfers", move_to_another_minute, FaultKind.REPORT_CHANGED),
    "line_deleted": changing("transfers", lambda rows: rows.pop(), FaultKind.LINES_DIFFER),
    "first_line_deleted": changing("transfers", lambda rows: rows.pop(0), FaultKind.LINES_DIFFER),
    "line_inserted": changing("transfers", add_a_line, FaultKind.LINES_DIFFER),
    "lines_of_no_report": changing("transfers", add_lines_of_no_report, FaultKind.ARCHIVE_CHANGED),
    "report_deleted": changing(
        "reports", lambda rows: rows.pop(1), FaultKind.ARCHIVE_CHANGED, FaultKind.REPORT_CHANGED
    ),
    "region": changing("reports", rename_the_region, FaultKind.REPORT_CHANGED),
    "head": changing("heads", edit_a_head, FaultKind.REPORT_CHANGED, FaultKind.SEALED_REPORTS_CHANGED),
    "head_deleted": changing(
        "heads", lambda rows: rows.pop(), FaultKind.REPORT_CHANGED, FaultKind.SEALED_REPORTS_CHANGED
    ),
    "movement": changing("movements", lambda rows: rows[-1].update(units=999), FaultKind.SEALED_MOVEMENTS_CHANGED),
    "movement_deleted": changing("movements", lambda rows: rows.pop(0), FaultKind.SEALED_MOVEMENTS_CHANGED),
    "seal": changing("seals", edit_a_balance, FaultKind.SEAL_CHANGED),
    "seal_deleted": changing("seals", lambda rows: rows.pop(1), FaultKind.SEAL_MISSING),
    "last_report_cut": Case(cut_the_last_report, (FaultKind.SEALED_BALANCE_CHANGED,)),
    "head_recomputed": Case(recompute_a_head, (FaultKind.REPORT_CHANGED,)),
    "heads_recomputed": Case(recompute_heads, (FaultKind.SEALED_REPORTS_CHANGED,)),
    "seals_recomputed": Case(recompute_seals, (FaultKind.KEPT_SEAL_DIFFERS,)),
}


@pytest.mark.parametrize("forgery", ROW_FORGERIES)
async def test_a_changed_row_is_found_though_the_manifest_fits(forged: Forged, forgery: str) -> None:
    seal = forged.rows("seals")[-1]
    kept = [KeptSeal(seal["number"], seal["hash"].hex())]
    forged.write("transfers", forged.rows("transfers"))
    forged.fit_manifest()
    assert (await forged.check(kept)).fault is None  # rewriting alone changes nothing
    ROW_FORGERIES[forgery].forge(forged)
    forged.fit_manifest()
    found = await forged.check(kept)
    assert found.fault is not None
    assert found.fault.kind in ROW_FORGERIES[forgery].kinds, found.fault


async def test_a_line_of_another_period_is_proven_as_well(archives: Path, tmp_path: Path) -> None:
    shutil.copytree(archives / SECOND_DAY / "1", tmp_path / "forged")
    forged = Forged(tmp_path / "forged")
    assert forged.rows("others")
    forged.change("others", edit_units)
    forged.fit_manifest()
    found = await forged.check([])
    assert found.fault is not None
    assert found.fault.kind is FaultKind.REPORT_CHANGED
