"""A tenant's decisions are found by the index among very many, whatever other tenants do.

`LEASEHOLD_LARGE_LOG=10000000` fills the log with as many rows, and logs how long the answers took.
"""

import re
import statistics
import time
from typing import Any

import httpx
import msgspec
import pytest
import structlog

from coordinator.decision_log.read import summing_statement
from coordinator.decision_log.store import keep_days
from tests.budget import size
from tests.integration.coordinator.admin_harness import AdminHarness
from tests.integration.coordinator.fixtures import NOON

pytestmark = pytest.mark.anyio

log = structlog.get_logger()

ROWS = size("LEASEHOLD_LARGE_LOG", 20_000)
TURNS = 5
# Of a day; a tenth are admissions. The first tenants have most of the rows: `tenant-0` has every tenth.
_FILL = """
INSERT INTO decision (at, id, tenant, region, agent, outcome, mode, reason, policy, name, quota, cost, limit_units,
    share, remaining, retry_after_ms, epoch, latency_us, weight, times, subject)
SELECT timestamptz '2026-11-18 00:00Z' + n * interval '1 second' * (86400.0 / $1), gen_random_uuid(), tenant, 'eu-west',
    'agent-1',
    CASE n % 10 WHEN 0 THEN 'admitted' ELSE 'denied' END, 'enforce', CASE n % 10 WHEN 0 THEN NULL ELSE 'limit' END,
    'search', 'api', 'api:tenant=' || tenant, 1, 1000, 300, 0, 900, 7, 250, CASE n % 10 WHEN 0 THEN 1000 ELSE 1 END, 1,
    '{"route": "/v1/search", "method": "GET", "api_key": "h_0123456789abcdef"}'
FROM generate_series(0, $1 - 1) AS n,
    LATERAL (SELECT 'tenant-' || floor(1000 * power(hashint8(n) / 4294967296.0 + 0.5, 3))::int AS tenant) AS named
"""


async def test_a_tenants_decisions_are_found_by_the_index(admin_harness: AdminHarness) -> None:
    owner = admin_harness.owner
    async with owner.transaction():
        await keep_days(owner, NOON, NOON, 7)
    await owner.execute(_FILL, ROWS, timeout=3_600)
    await owner.execute("VACUUM ANALYZE decision", timeout=3_600)
    admin_harness.clock.move(days=1)
    auditor = await admin_harness.caller("audit:read")
    expected = await owner.fetchval("SELECT count(*) FROM decision WHERE tenant = 'tenant-0' AND outcome = 'denied'")
    for name, window in {
        "five minutes": {"from": "2026-11-18T15:00:00Z", "to": "2026-11-18T15:05:00Z"},
        "an hour": {"from": "2026-11-18T15:00:00Z", "to": "2026-11-18T16:00:00Z"},
        "the day": {"from": "2026-11-18", "to": "2026-11-19"},
    }.items():
        seconds, answer = await timed(auditor, tenant="tenant-0", page_size="100", **window)
        log.info("large log answered", window=name, rows=ROWS, denied=answer["summary"]["denied"], seconds=seconds)
    assert answer["summary"]["denied"] == expected
    in_index = await owner.fetchval(_COLUMNS)
    assert set(re.findall(r"decision\.(\w+)", summing_statement(COVERED).sql)) <= set(in_index), (
        "no row is read to sum up"
    )
    assert await owner.fetchval(_VACUUM) == VACUUM_EARLY
    rows, indexes = await owner.fetchrow(_SIZE, timeout=600) or (0, 0)
    log.info("large log", bytes_of_a_row=rows, of_its_indexes=indexes)


async def timed(auditor: httpx.AsyncClient, **question: str) -> tuple[str, Any]:
    """Return how long an answer took, of several the median, and the answer."""
    taken = []
    for _ in range(TURNS):
        began = time.perf_counter()
        answer = await auditor.get("/v1/decisions", params=question, timeout=60)
        taken.append(time.perf_counter() - began)
        assert answer.status_code == 200, answer.text
    return f"{statistics.median(taken):.3f} s ({min(taken):.3f} to {max(taken):.3f})", msgspec.json.decode(
        answer.content
    )


COVERED = ("start", "end", "tenant", "outcomes", "reasons", "policies", "quotas", "regions")  # conditions
_COLUMNS = "SELECT array_agg(attname::text) FROM pg_attribute WHERE attrelid = 'decision_summary'::regclass"
_VACUUM = "SELECT reloptions FROM pg_class WHERE relname = 'decision_2026-11-18'"
VACUUM_EARLY = ["autovacuum_vacuum_insert_scale_factor=0", "autovacuum_vacuum_insert_threshold=100000"]
_SIZE = """
SELECT sum(pg_relation_size(inhrelid))::bigint / (SELECT count(*) FROM decision)::int AS of_rows,
    sum(pg_indexes_size(inhrelid))::bigint / (SELECT count(*) FROM decision)::int AS of_indexes
FROM pg_inherits WHERE inhparent = 'decision'::regclass
"""
