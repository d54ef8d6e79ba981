"""Exports are counted and hashed, and have the same bytes whenever and by whichever coordinator they are read."""

import asyncio
import hashlib
import json
import tracemalloc
from collections.abc import AsyncIterator
from datetime import datetime
from itertools import pairwise
from typing import Any
from uuid import uuid4

import httpx
import pytest
from msgspec.structs import replace

from coordinator.database.engine import Database, open_database
from coordinator.exports import requests
from coordinator.exports.job import CHUNKS_TO_A_MARK, make_exports
from coordinator.exports.requests import Export, ExportRequest, ask_export, read_from, walk
from coordinator.exports.rules import ExportFormat
from tests.budget import size
from tests.conftest import restricted
from tests.integration.coordinator.admin_harness import AdminHarness, Region, Used, problem, sealed
from tests.integration.coordinator.fixtures import NOON, StandingClock, connected, put_off
from tests.integration.coordinator.spreadsheets import csv_rows
from tests.integration.coordinator.usage.test_statements import DAY, MAILS, at, close, region

__all__ = ["region"]
pytestmark = pytest.mark.anyio
MONTH = "2026-11"
# Lines of the large export; a thousand times as many on request.
LINES = size("LEASEHOLD_EXPORT_LINES", 60_000, short=40_000)
PLAIN = {"Accept-Encoding": "identity"}


async def exported(finance: httpx.AsyncClient, **asked: Any) -> dict[str, Any]:
    """Request an export and wait until a coordinator has counted it."""
    answer = await finance.post("/v1/exports", json=asked)
    assert answer.status_code == 202, answer.text
    path = answer.headers["Location"]
    async with asyncio.timeout(30):
        while (manifest := (await finance.get(path)).json())["finished_at"] is None:  # noqa: ASYNC110 - done elsewhere
            await asyncio.sleep(0.02)
    found: dict[str, Any] = manifest
    return found


async def data(finance: httpx.AsyncClient, manifest: dict[str, Any], **headers: str) -> httpx.Response:
    return await finance.get(f"/v1/exports/{manifest['id']}/data", headers=PLAIN | headers)


def text(cell: object) -> str:
    """Return a value as in CSV."""
    if isinstance(cell, datetime):
        return cell.isoformat().replace("+00:00", "Z")
    return "" if cell is None else str(cell)


async def test_an_export_has_every_line_with_its_report(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    await put_off(admin_harness.owner, "seal")  # its manifest names the newest seal
    await sealed(admin_harness)
    manifest = await exported(finance, period=DAY)
    answer = await data(finance, manifest)
    assert answer.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert (len(answer.content), hashlib.sha256(answer.content).hexdigest()) == (manifest["bytes"], manifest["sha256"])
    head, *rows = csv_rows(answer.content)
    assert (head, len(rows)) == (manifest["columns"], manifest["rows"])
    booked = await admin_harness.owner.fetch(
        "SELECT * FROM transfer WHERE period = $1 AND dst = 'consumed' ORDER BY id", DAY
    )
    assert [(int(row[0]), int(row[12]), int(row[14]), int(row[16])) for row in rows] == [
        (each["id"], each["units"], each["epoch"], each["seq"]) for each in booked
    ]
    assert rows[0][1:9] == ["2026-11-18T09:05:00Z", DAY, DAY, "acme", "mails", MAILS, "eu-west", "mail"]
    # Another seal may have been made meanwhile.
    seal = await admin_harness.owner.fetchrow("SELECT * FROM seal WHERE number = $1", manifest["ledger_head"]["seal"])
    assert seal is not None
    assert seal["transfer"] == await admin_harness.owner.fetchval("SELECT max(id) FROM transfer")
    told = {"seal": seal["number"], "hash": seal["hash"].hex(), "position": seal["position"]}
    assert manifest["ledger_head"] == told | {"transfer": seal["transfer"]}

    as_lines = await exported(finance, period=DAY, format="ndjson", tenant="acme")
    told_lines = [json.loads(line) for line in (await data(finance, as_lines)).text.splitlines()]
    assert [list(map(text, line.values())) for line in told_lines] == rows


async def test_an_export_is_of_one_moment_and_one_tenant(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    before = await exported(finance, period=MONTH)
    content = (await data(finance, before)).content
    await region.use("exports:tenant=globex", MONTH, [Used(at("18T09:05"), 9)])
    assert (await exported(finance, period=MONTH))["sha256"] == before["sha256"]  # it is not sealed
    await sealed(admin_harness)
    assert [(await exported(finance, period=MONTH, **of))["rows"] for of in ({}, {"tenant": "globex"})] == [2, 1]
    assert (await exported(finance, period=MONTH, tenant="acme"))["sha256"] == before["sha256"]
    assert (await data(finance, before)).content == content
    assert before["is_final"] is False


async def test_a_closed_period_is_exported_for_good(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    await put_off(admin_harness.owner, "seal")  # otherwise the coordinator may seal between the close and the export
    await region.exchange(MAILS, frozen=[region.leases[MAILS, DAY] | {"returned": 7}])
    await close(admin_harness)
    assert (await exported(finance, period=DAY))["is_final"] is False  # the seal precedes the last report
    await sealed(admin_harness)
    assert (await exported(finance, period=DAY))["is_final"] is True


@pytest.mark.usefixtures("region")
async def test_a_download_is_resumed_where_it_ended(finance: httpx.AsyncClient) -> None:
    manifest = await exported(finance, period=DAY)
    whole = await data(finance, manifest)
    tag, size = whole.headers["ETag"], manifest["bytes"]
    assert tag == f'"{manifest["sha256"]}"'
    for start in (1, size // 2, size - 1):
        rest = await data(finance, manifest, Range=f"bytes={start}-", **{"If-Range": tag})
        assert (rest.status_code, rest.content) == (206, whole.content[start:])
        assert rest.headers["Content-Range"] == f"bytes {start}-{size - 1}/{size}"
    # Other validators and invalid ranges are answered with the whole file.
    for headers in ({"Range": "bytes=5-", "If-Range": '"other"'}, {"Range": "bytes=1-2,4-5"}, {"Range": "bytes=-5"}):
        assert (await data(finance, manifest, **headers)).content == whole.content
    assert problem(await data(finance, manifest, Range=f"bytes={size}-")) == (416, [])
    packed = await finance.get(f"/v1/exports/{manifest['id']}/data", headers={"Accept-Encoding": "gzip"})
    assert (packed.headers["Content-Encoding"], packed.content) == ("gzip", whole.content)
    assert (await data(finance, manifest, **{"If-None-Match": tag})).status_code == 304


@pytest.mark.usefixtures("region")
async def test_invalid_exports_are_refused(admin_harness: AdminHarness, finance: httpx.AsyncClient) -> None:
    for body, expected in (
        ({"period": DAY, "format": "xls"}, (422, [("format", "enum")])),
        ({"period": DAY, "tenant": "a\nb"}, (422, [("tenant", "text")])),
        ({"period": "2020-01"}, (404, [])),
        ({"period": DAY, "columns": "all"}, (422, [("columns", "unknown")])),
    ):
        assert problem(await finance.post("/v1/exports", json=body)) == expected
    for unknown in (uuid4(), "x"):
        assert problem(await finance.get(f"/v1/exports/{unknown}")) == (404, [])
        assert problem(await finance.get(f"/v1/exports/{unknown}/data")) == (404, [])
    await admin_harness.owner.execute("UPDATE job SET due_at = now() + interval '1 day' WHERE name = 'make_exports'")
    async with admin_harness.owner.transaction():
        request = ExportRequest(DAY, None, ExportFormat.CSV)
        waiting = await ask_export(admin_harness.owner, uuid4(), request, uuid4(), NOON)
    assert isinstance(waiting, Export)
    await admin_harness.owner.execute("UPDATE export SET finished_at = NULL, sha256 = NULL, resume_points = NULL")
    assert problem(await finance.get(f"/v1/exports/{waiting.id}/data")) == (409, [])


# --- a large one ------------------------------------------------------------------------------------------------------


LARGE = """
INSERT INTO period (id, kind, starts_at, ends_at) VALUES ('2026-11', 'month', '2026-11-01', '2026-12-01');
INSERT INTO pool (quota, period, name, tenant)
SELECT 'exports:tenant=t' || n, '2026-11', 'exports', 't' || n FROM generate_series(0, 9) AS n;
"""
MANY = """
INSERT INTO transfer (period, quota, src, dst, units, cause, region, epoch, lane, seq, line, window_at, dimensions,
    charge_period, recorded_at)
SELECT '2026-11', 'exports:tenant=t' || n % 10, 'outstanding', 'consumed', 1 + n % 7, 'usage', 'eu-west', 1, 0,
    1 + n / 500, n % 500, timestamptz '2026-11-01 00:00Z' + n % 40000 * interval '1 minute', '{"policy": "export"}',
    '2026-11', now()
FROM generate_series(0, $1::int - 1) AS n
"""
SEAL = """
INSERT INTO seal SELECT 1, '', 0, (SELECT max(id) FROM transfer), 0, 0, '', 0, '', 0, '', '{}', now(), 'x'
"""


@pytest.fixture
async def large(database: str) -> AsyncIterator[tuple[Database, Export]]:
    """Yield a large export that a coordinator of its own has counted."""
    async with connected(database) as owner:
        await owner.execute(LARGE)
        await owner.execute(MANY, LINES)
        await owner.execute(SEAL)
        async with owner.transaction():
            asked = await ask_export(owner, uuid4(), ExportRequest(MONTH, None, ExportFormat.CSV), uuid4(), NOON)
    assert isinstance(asked, Export)
    async with open_database(restricted(database), 2) as one:
        await make_exports(one, StandingClock())
        found = await one.read(lambda c: requests.read_export(c, asked.id))
        assert found is not None
        yield one, found


@pytest.mark.extended
async def test_memory_does_not_grow_with_the_export(large: tuple[Database, Export]) -> None:
    one, export = large
    assert export.rows == LINES
    last = export.ledger_head.transfer

    async def peak(of: Export) -> tuple[int, int]:
        tracemalloc.start()
        try:
            size = 0
            async for chunk in walk(one, of):
                size += len(chunk.body)
            return tracemalloc.get_traced_memory()[1], size
        finally:
            tracemalloc.stop()

    await peak(export)  # what is created once and kept
    head = export.ledger_head
    little = replace(export, ledger_head=replace(head, transfer=last - LINES * 3 // 4))
    (of_little, little_bytes), (of_all, all_bytes) = await peak(little), await peak(export)
    assert all_bytes > 3 * little_bytes
    assert of_all < 1.3 * of_little


async def test_a_download_of_a_large_export_begins_at_a_mark(large: tuple[Database, Export]) -> None:
    one, export = large
    resume_points = await one.read(
        lambda c: c.fetchval("SELECT jsonb_array_length(resume_points) FROM export WHERE id = $1", export.id)
    )
    assert resume_points == LINES // (requests.CHUNK * CHUNKS_TO_A_MARK)
    whole = b"".join([part async for part in read_from(one, export, 0)])
    assert hashlib.sha256(whole).hexdigest() == export.sha256
    for start in (10, len(whole) // 2, len(whole) - 10):
        assert b"".join([part async for part in read_from(one, export, start)]) == whole[start:]


SHARED = """
INSERT INTO pool (quota, period, name) VALUES ('exports', '2026-11', 'exports');
INSERT INTO transfer (period, quota, src, dst, units, cause, region, movement_id, window_at, dimensions, charge_period,
    recorded_at)
SELECT '2026-11', 'exports', 'outstanding', 'consumed', 1, 'usage', 'eu-west', gen_random_uuid(), '2026-11-01 00:00Z',
    jsonb_build_object('tenant', tenant), '2026-11', now()
FROM unnest(ARRAY['t3', 't4', 'nobody']) AS tenant
"""


@pytest.mark.extended
async def test_each_query_for_lines_of_a_tenant_is_bounded(database: str, large: tuple[Database, Export]) -> None:
    """Some lines are of quotas counted by tenant, and one is of a quota that all tenants share."""
    one, export = large
    async with connected(database) as owner:
        await owner.execute(SHARED)
        last = await owner.fetchval("SELECT max(id) FROM transfer")
    head = replace(export.ledger_head, transfer=last)
    for tenant, rows in {"t3": LINES // 10 + 1, "nobody": 1, "t99": 0}.items():
        chunks = [chunk async for chunk in walk(one, replace(export, tenant=tenant, ledger_head=head))]
        assert sum(chunk.rows for chunk in chunks) == rows
        assert all(b.last_transfer - a.last_transfer <= requests.STRETCH for a, b in pairwise(chunks))
        assert chunks[-1].last_transfer == last
