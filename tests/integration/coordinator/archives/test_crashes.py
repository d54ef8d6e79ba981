"""A coordinator that dies anywhere while it archives loses nothing: the next one goes on or begins again."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.archives.check import check_archive
from coordinator.archives.job import archive_periods
from coordinator.archives.statements import hold_archives
from coordinator.archives.store import ArchiveStore, ArchiveWriter
from coordinator.outages import TransactionFailed
from tests.integration.coordinator.archives.conftest import Archivist
from tests.integration.coordinator.archives.test_archives import answers, is_intact
from tests.integration.coordinator.fixtures import connected
from tests.integration.coordinator.proof.history import NOVEMBER

pytestmark = pytest.mark.anyio


class Crash(Exception):
    """The coordinator dies here."""


class CrashingStore(ArchiveStore):
    """A place where the coordinator dies at the n-th call, before the call or after it."""

    def __init__(self, location: str, dies_at: int, *, is_after: bool) -> None:
        super().__init__(location)
        self.calls, self._dies_at, self._is_after = 0, dies_at, is_after

    def _called(self, call: Any, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == self._dies_at and not self._is_after:
            raise Crash
        found = call(*arguments)
        if self.calls == self._dies_at:
            raise Crash
        return found

    def writer(self, folder: str, name: str) -> ArchiveWriter:
        writer: ArchiveWriter = self._called(super().writer, folder, name)
        end = writer.end
        writer.end = lambda: self._called(end)  # type: ignore[method-assign]
        return writer

    def put(self, folder: str, name: str, content: bytes) -> None:
        self._called(super().put, folder, name, content)

    def flush(self, folder: str) -> None:
        self._called(super().flush, folder)

    def get(self, folder: str, name: str) -> bytes:
        content: bytes = self._called(super().get, folder, name)
        return content

    def names(self, folder: str) -> list[str]:
        found: list[str] = self._called(super().names, folder)
        return found


MOST_CALLS = 40


async def booked(archivist: Archivist) -> Any:
    return await archivist.owner.fetch("SELECT * FROM transfer WHERE period = $1 ORDER BY id", NOVEMBER)


@pytest.mark.parametrize("is_after", [False, True])
async def test_a_crash_at_any_step_loses_nothing(archivist: Archivist, tmp_path: Path, is_after: bool) -> None:
    """The coordinator dies at its first step, its successor at the second one, and so on, until one gets through."""
    before, rows = await answers(archivist, NOVEMBER), await booked(archivist)
    assert (await archivist.request(NOVEMBER)).status_code == 202
    crashes = 0
    for dies_at in range(1, MOST_CALLS):
        store = CrashingStore(str(tmp_path / "archives"), dies_at, is_after=is_after)
        try:
            await archive_periods(archivist.database, store, archivist.clock)
        except Crash:
            crashes += 1
            assert await booked(archivist) == rows
            assert (await archivist.progress(NOVEMBER))["state"] == "writing"
            continue
        break
    assert crashes > 10
    assert (await archivist.progress(NOVEMBER))["state"] == "archived"
    assert len(await booked(archivist)) < len(rows)
    folder = await archivist.owner.fetchval("SELECT folder FROM archive")
    assert (await check_archive(archivist.store, folder)).intact
    assert await answers(archivist, NOVEMBER) == before
    await is_intact(archivist)


@pytest.mark.extended
async def test_a_complete_attempt_is_not_written_again(archivist: Archivist, closed_database: str) -> None:
    """A verification holds the archives while it reads. The coordinator gives up, and the next one only removes."""
    rows = await booked(archivist)
    assert (await archivist.request(NOVEMBER)).status_code == 202
    async with connected(closed_database) as reader, reader.transaction():
        await hold_archives(reader)
        with pytest.raises(TransactionFailed):
            await archivist.run()
        assert await booked(archivist) == rows
    manifest = archivist.store.get(f"{NOVEMBER}/1", "manifest.json")
    await archivist.run()
    assert (await archivist.progress(NOVEMBER))["state"] == "archived"
    assert archivist.store.get(f"{NOVEMBER}/1", "manifest.json") == manifest


@pytest.mark.extended
async def test_a_damaged_attempt_is_deleted_and_written_again(archivist: Archivist, closed_database: str) -> None:
    assert (await archivist.request(NOVEMBER)).status_code == 202
    async with connected(closed_database) as reader, reader.transaction():
        await hold_archives(reader)
        with pytest.raises(TransactionFailed):
            await archivist.run()
    archivist.store.put(f"{NOVEMBER}/1", "transfers.parquet", b"damaged")
    await archivist.run()
    found = await archivist.progress(NOVEMBER)
    assert (found["state"], "transfers.parquet" in found["failure"]) == ("failed", True)
    (again,) = await archivist.archive(NOVEMBER)
    assert again["state"] == "archived"
    await is_intact(archivist)
