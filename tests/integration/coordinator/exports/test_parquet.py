"""Parquet exports are made by a job, are readable at every coordinator, equal the CSV with types, and expire."""

import asyncio
import hashlib
import io
import sys
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import httpx
import pyarrow.parquet
import pytest

from coordinator.database.connection import Connection
from coordinator.database.engine import Database, open_database
from coordinator.exports import job as exports_job
from coordinator.exports.job import delete_expired_exports, make_exports
from coordinator.exports.requests import (
    Export,
    ExportRequest,
    PartMissing,
    ask_export,
    cancel_export,
    read_export,
    read_from,
)
from coordinator.exports.rules import ExportFormat
from tests.conftest import restricted
from tests.integration.coordinator.admin_harness import AdminHarness, Region, problem
from tests.integration.coordinator.exports.test_exports import LINES, data, exported, large, text
from tests.integration.coordinator.fixtures import NOON, StandingClock, connected, put_off
from tests.integration.coordinator.spreadsheets import csv_rows
from tests.integration.coordinator.usage.test_statements import DAY, region

__all__ = ["large", "region"]
pytestmark = pytest.mark.anyio
MONTH = "2026-11"
PARQUET = ExportRequest(MONTH, None, ExportFormat.PARQUET)


def table_of(content: bytes) -> Any:
    return pyarrow.parquet.read_table(io.BytesIO(content))


def as_csv(table: Any) -> list[list[str]]:
    return [[text(cell) for cell in row.values()] for row in table.to_pylist()]


async def no_other_seal(admin_harness: AdminHarness) -> None:
    """Stop sealing from here on, because the export as of another seal is another export."""
    await put_off(admin_harness.owner, "seal")


async def test_a_parquet_export_is_the_csv_with_types(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    await no_other_seal(admin_harness)
    manifest = await exported(finance, period=DAY, format="parquet")
    answer = await data(finance, manifest)
    assert answer.headers["Content-Type"] == "application/vnd.apache.parquet"
    assert (len(answer.content), hashlib.sha256(answer.content).hexdigest()) == (manifest["bytes"], manifest["sha256"])
    in_text = await exported(finance, period=DAY)
    head, *rows = csv_rows((await data(finance, in_text)).content)
    table = table_of(answer.content)
    assert (table.column_names, as_csv(table)) == (head, rows)
    assert manifest["rows"] == manifest["rows_expected"] == in_text["rows"] == len(rows)
    assert manifest["ledger_head"] == in_text["ledger_head"]
    facts = {name.decode(): value.decode() for name, value in table.schema.metadata.items()}
    assert facts["leasehold.seal_hash"] == manifest["ledger_head"]["hash"]
    assert (facts["leasehold.period"], facts["leasehold.is_final"]) == (DAY, "false")

    tag, size = answer.headers["ETag"], manifest["bytes"]
    rest = await data(finance, manifest, Range=f"bytes={size // 2}-", **{"If-Range": tag})
    assert (rest.status_code, rest.content) == (206, answer.content[size // 2 :])
    assert (await data(finance, manifest, **{"If-None-Match": tag})).status_code == 304
    plain = await finance.get(f"/v1/exports/{manifest['id']}/data", headers={"Accept-Encoding": "gzip"})
    assert "Content-Encoding" not in plain.headers  # it is compressed already


async def test_an_export_of_a_tenant_without_usage_has_no_rows(finance: httpx.AsyncClient, region: Region) -> None:
    manifest = await exported(finance, period=DAY, format="parquet", tenant="nobody")
    table = table_of((await data(finance, manifest)).content)
    assert (manifest["rows"], table.num_rows, table.column_names) == (0, 0, manifest["columns"])


@pytest.mark.usefixtures("region")
async def test_without_pyarrow_the_error_names_what_to_install(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused = await finance.post("/v1/exports", json={"period": DAY, "format": "parquet"})
    assert problem(refused) == (422, [("format", "supported")])
    assert "install leasehold[parquet]" in refused.json()["invalid_parameters"][0]["reason"]
    assert not await admin_harness.owner.fetchval("SELECT count(*) FROM export")


# --- a large one, in several parts ------------------------------------------------------------------------------------


@pytest.fixture
async def other(database: str) -> AsyncIterator[Connection]:
    async with connected(database) as owner:
        yield owner


@pytest.fixture(autouse=True)
def of_several_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports_job, "ROW_GROUP", LINES // 4)


async def asked(owner: Connection, token: UUID | None = None, now: datetime = NOON) -> Export:
    async with owner.transaction():
        found = await ask_export(owner, uuid4(), PARQUET, token or uuid4(), now)
    assert isinstance(found, Export)
    return found


async def content(database: Database, export: UUID) -> tuple[Export, bytes]:
    found = await database.read(lambda c: read_export(c, export))
    assert found is not None
    return found, b"".join([part async for part in read_from(database, found, 0)])


async def parts(owner: Connection) -> int:
    count: int = await owner.fetchval("SELECT count(*) FROM export_part")
    return count


async def test_an_interrupted_export_is_restarted_by_another_coordinator_and_never_mixed(
    database: str, large: tuple[Database, Export], other: Connection
) -> None:
    """The first coordinator is not dead but slow: it writes nothing any more once another has taken over."""
    one, in_text = large
    export = await asked(other)
    first = await one.run(lambda c: exports_job._begin(c, export.id))
    assert first is not None
    some = exports_job._Made(1, 7, 5)
    assert await one.run(lambda c: exports_job._keep(c, first, some, 0, b"wrong"))
    async with open_database(restricted(database), 2) as another:
        second = await another.run(lambda c: exports_job._begin(c, export.id))
        assert second is not None
        assert not await one.run(lambda c: exports_job._keep(c, first, some, 5, b"wrong"))
        assert await parts(other) == 0
        await make_exports(another, StandingClock())
        assert not await another.run(lambda c: exports_job._keep(c, second, some, 5, b"wrong"))
        finished, body = await content(another, export.id)
    assert (await content(one, export.id))[1] == body  # at any coordinator
    assert hashlib.sha256(body).hexdigest() == finished.sha256
    assert (finished.rows, finished.rows_expected, await parts(other)) == (LINES, LINES, 5)
    units = sum(table_of(body)["units"].to_pylist())
    assert units == await other.fetchval("SELECT sum(units) FROM transfer WHERE dst = 'consumed'")
    for start in (1, finished.bytes // 2, finished.bytes - 1):
        assert b"".join([part async for part in read_from(one, finished, start)]) == body[start:]
    assert in_text.rows == finished.rows


@pytest.mark.extended
async def test_progress_is_reported_in_lines(large: tuple[Database, Export], other: Connection) -> None:
    one, _ = large
    export = await asked(other)
    attempt = await one.run(lambda c: exports_job._begin(c, export.id))
    assert attempt is not None
    found = await read_export(other, export.id)
    assert found is not None
    assert (found.rows, found.rows_expected, found.progress) == (0, None, 0)
    await one.run(lambda c: exports_job._still(c, exports_job._EXPECT, attempt, 60_000))
    await one.run(lambda c: exports_job._keep(c, attempt, exports_job._Made(1, 15_000, 5), 0, b"bytes"))
    found = await read_export(other, export.id)
    assert found is not None
    assert (found.rows, found.rows_expected, found.progress) == (15_000, 60_000, 250)


@pytest.mark.extended
async def test_an_export_in_progress_can_be_cancelled(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    await no_other_seal(admin_harness)
    friend, stranger = await admin_harness.caller("usage:read"), await admin_harness.caller("usage:read")
    manifest = await exported(finance, period=DAY, format="parquet")
    assert (await exported(friend, period=DAY, format="parquet"))["id"] == manifest["id"]
    path = f"/v1/exports/{manifest['id']}:cancel"
    for client in (stranger, finance, finance):
        answer = await client.post(path)
        assert (answer.status_code, answer.json()) == (200, manifest)
    assert (await data(friend, manifest)).status_code == 200
    assert (await friend.post(path)).json()["cancelled_at"]
    assert problem(await data(friend, manifest)) == (410, [])
    assert await parts(admin_harness.owner) == 0
    assert (await exported(friend, period=DAY, format="parquet"))["id"] != manifest["id"]
    assert problem(await finance.post(f"/v1/exports/{uuid4()}:cancel")) == (404, [])


@pytest.mark.extended
async def test_a_cancelled_export_is_not_made(large: tuple[Database, Export], other: Connection) -> None:
    one, _ = large
    export, token = await asked(other), uuid4()
    ours = await asked(other, token)
    assert ours.id == export.id
    attempt = await one.run(lambda c: exports_job._begin(c, export.id))
    assert attempt is not None
    await other.execute("UPDATE export SET requesters = ARRAY[$1::uuid] WHERE id = $2", token, export.id)
    async with other.transaction():
        await cancel_export(other, export.id, token, NOON)
    assert not await one.run(lambda c: exports_job._keep(c, attempt, exports_job._Made(1, 1, 1), 0, b"x"))
    await make_exports(one, StandingClock())
    assert await parts(other) == 0


@pytest.mark.extended
async def test_an_export_is_kept_for_a_week(large: tuple[Database, Export], other: Connection) -> None:
    one, _ = large
    export, clock = await asked(other), StandingClock()
    await make_exports(one, clock)
    finished, _ = await content(one, export.id)
    assert finished.expires_at == clock.now() + exports_job.KEPT_FOR
    reading = read_from(one, finished, 0)
    await anext(reading)
    async with other.transaction():
        await delete_expired_exports(other, clock.now())
    assert await parts(other) == 5
    async with other.transaction():
        await delete_expired_exports(other, finished.expires_at)
    assert await parts(other) == 0
    with pytest.raises(PartMissing):
        await anext(reading)
    assert not finished.is_kept(finished.expires_at)
    assert (await asked(other, now=finished.expires_at)).id != export.id


async def test_two_parallel_requests_get_one_export(
    database: str, large: tuple[Database, Export], other: Connection
) -> None:
    async with connected(database) as second:
        async with other.transaction():
            first = await ask_export(other, uuid4(), PARQUET, uuid4(), NOON)
            asking = asyncio.create_task(asked(second))
            async with asyncio.timeout(30):
                while not asking.done() and not await other.fetchval(WAITS):  # noqa: ASYNC110 - the other's lock
                    await asyncio.sleep(0.01)
        assert isinstance(first, Export)
        assert (await asking).id == first.id


WAITS = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)"
