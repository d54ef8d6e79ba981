"""Read the facts that the checks of a coordinator and of its database judge.

The same statements serve a coordinator, which reads as its own role, and `leasehold doctor --database-url`, which may
read as an owner: that one sees which standbys are connected.
"""

import shutil
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from time import perf_counter
from urllib.parse import parse_qs, urlsplit

from coordinator.database.connection import Connection
from coordinator.diagnosis.facts import (
    LateJob,
    LedgerFacts,
    RegionFacts,
    SchemaFacts,
    ServerFacts,
    Standby,
    TableSize,
    WebhookFacts,
)
from coordinator.health.readiness import schema_revision, write_message
from coordinator.jobs import Job, select_due
from coordinator.proof.verify_guards import fault_of_guards, guards_are_known
from coordinator.regions.read_regions import read_regions
from migrations.revisions import is_behind, known_revisions
from protocol.addresses import is_loopback
from protocol.clock import Clock

SERVER_SETTINGS = (
    "fsync",
    "full_page_writes",
    "synchronous_commit",
    "synchronous_standby_names",
    "max_connections",
    "data_directory",
)
COMMITS = 5
MOST_REGIONS = 1_000
MOST_TABLES = 100
JOB_PATIENCE_S = 60.0
VERIFYING = ("verify-ca", "verify-full")
_MILLISECOND = timedelta(milliseconds=1)


# --- the server -------------------------------------------------------------------------------------------------------


async def read_server(connection: Connection, url: str, clock: Clock) -> ServerFacts:
    """Read what the server tells about itself. `url`: where it was reached."""
    asked_at = clock.now()
    row = await connection.fetchrow(_SERVER)
    assert row is not None
    answered_at = clock.now()
    settings = {each["name"]: each["setting"] for each in await connection.fetch(_SETTINGS, SERVER_SETTINGS)}
    is_local = _is_local(url)
    return ServerFacts(
        version=row["version"],
        version_number=row["version_number"],
        settings=settings,
        standbys=[Standby(*each.values()) for each in await connection.fetch(_STANDBYS)],
        is_standby=row["is_standby"],
        is_encrypted=row["is_encrypted"],
        is_local=is_local,
        verifies_certificate=_sslmode(url) in VERIFYING,
        connections=row["connections"],
        oldest_transaction_age=row["oldest_transaction_age"],
        commits_ms=[] if row["is_standby"] else await _measure_commits(connection),
        clock_ahead_ms=_ahead_ms(asked_at, row["now"], answered_at),
        free_bytes=_free_bytes(settings.get("data_directory")) if is_local else None,
        may_see_statistics=row["may_see_statistics"],
    )


async def _measure_commits(connection: Connection) -> list[float]:
    """Measure transactions that change no table and wait for the disk and the standbys, as every booking does."""
    measured = []
    for _ in range(COMMITS):
        began = perf_counter()
        async with connection.transaction():
            await write_message(connection)
        measured.append(1000 * (perf_counter() - began))
    return measured


def _ahead_ms(asked_at: datetime, database_now: datetime, answered_at: datetime) -> int:
    """Return how far this clock is ahead of the database's, as far as the round trip does not explain it."""
    return max(0, (asked_at - database_now) // _MILLISECOND) or min(0, -((database_now - answered_at) // _MILLISECOND))


def _hosts(url: str) -> list[str]:
    parts = urlsplit(url)
    named = parse_qs(parts.query).get("host", [""])[-1] or parts.netloc.rpartition("@")[2]
    return [host.rsplit(":", 1)[0] if not host.startswith(("/", "[")) else host for host in named.split(",")]


def _is_local(url: str) -> bool:
    sockets = ("/", "%2F", "%2f")
    return all(not host or host.startswith(sockets) or is_loopback(host.strip("[]")) for host in _hosts(url))


def _sslmode(url: str) -> str:
    return parse_qs(urlsplit(url).query).get("sslmode", ["prefer"])[-1]


def _free_bytes(directory: str | None) -> int | None:
    """Return the free bytes of the disk of a local server, if its directory can be seen."""
    try:
        return shutil.disk_usage(directory).free if directory and Path(directory).is_dir() else None
    except OSError:
        return None


# --- the schema -------------------------------------------------------------------------------------------------------


async def read_schema(connection: Connection, role: str | None, now: datetime) -> SchemaFacts:
    """Read the schema, its guards and its sizes. `role`: that coordinators have, if not the connection's own."""
    revision, newest = await schema_revision(connection), known_revisions()[-1]
    row = await connection.fetchrow(_ROLE, role)
    assert row is not None
    if revision is None:
        return SchemaFacts(None, newest, True, row["role"], row["is_superuser"], False, None, False, [], None, 0)
    is_known = await guards_are_known(connection)
    fault = await fault_of_guards(connection) if is_known else None
    grown = await connection.fetchrow(_TRANSFERS, now - timedelta(days=1))
    assert grown is not None
    return SchemaFacts(
        revision=revision,
        newest_known=newest,
        is_behind=is_behind(revision),
        role=row["role"],
        is_superuser=row["is_superuser"],
        owns_ledger=row["owns_ledger"],
        guard_fault=None if fault is None else f"{fault.key}: {fault.reason}",
        guards_are_known=is_known,
        sizes=[TableSize(*each.values()) for each in await connection.fetch(_SIZES, MOST_TABLES)],
        transfers_a_day=None if grown["before"] is None else grown["transfers"] - grown["before"],
        transfers=grown["transfers"],
    )


# --- the ledger -------------------------------------------------------------------------------------------------------


async def read_ledger(
    connection: Connection, now: datetime, unconfirmed: str | None, jobs: Sequence[Job]
) -> LedgerFacts:
    """Read seals, verifications, jobs, webhooks and regions. `unconfirmed`: why this may be a copy."""
    row = await connection.fetchrow(_LEDGER)
    assert row is not None
    webhooks = await connection.fetch(_WEBHOOKS)
    return LedgerFacts(
        now=row["now"],
        sealed_at=row["sealed_at"],
        verified_at=row["verified_at"],
        last_verification_fault=row["fault"],
        late_jobs=await _read_late_jobs(connection, jobs, now),
        webhooks=[WebhookFacts(*each.values()) for each in webhooks],
        unconfirmed=unconfirmed,
        regions=[
            RegionFacts(
                each.name,
                None if each.last_seen_at is None else row["now"] - each.last_seen_at,
                each.status == "down",
                each.split_brain,
                each.regressed_lanes,
            )
            for each in await read_regions(connection, "", MOST_REGIONS, now)
        ],
        suspense_units=row["suspense_units"],
        suspense_since=row["suspense_since"],
    )


async def _read_late_jobs(connection: Connection, jobs: Sequence[Job], now: datetime) -> list[LateJob]:
    """Return jobs that have work and that no coordinator has done, for longer than one run and its retries take."""
    rows = {row["name"]: row for row in await connection.fetch(select_due(jobs), [job.name for job in jobs], now)}
    return [
        LateJob(job.name, timedelta(seconds=-rows[job.name]["due_in_s"]))
        for job in jobs
        if job.name in rows and rows[job.name]["has_work"] and -rows[job.name]["due_in_s"] > patience_s(job)
    ]


def patience_s(job: Job) -> float:
    return job.at_most_s + max(JOB_PATIENCE_S, 10 * job.every_s)


_SERVER = """
SELECT clock_timestamp() AS now, current_setting('server_version') AS version,
    current_setting('server_version_num')::int AS version_number, pg_is_in_recovery() AS is_standby,
    coalesce((SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()), false) AS is_encrypted,
    (SELECT sum(numbackends) FROM pg_stat_database) AS connections,
    (SELECT age(datfrozenxid) FROM pg_database WHERE datname = current_database()) AS oldest_transaction_age,
    pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS may_see_statistics
"""
# `synchronous_commit` may differ by database and role, so it is this connection's.
_SETTINGS = "SELECT name, setting FROM pg_settings WHERE name = ANY ($1::text[])"
_STANDBYS = "SELECT application_name, state, sync_state FROM pg_stat_replication ORDER BY application_name"
# Of a role that does not exist it tells about the connection's own.
_ROLE = """
SELECT rolname AS role, rolsuper AS is_superuser, EXISTS (
    SELECT FROM pg_class WHERE oid = to_regclass('transfer') AND pg_has_role(rolname, relowner, 'USAGE')) AS owns_ledger
FROM pg_roles WHERE rolname IN ($1::text, current_user) ORDER BY rolname = current_user LIMIT 1
"""
_SIZES = """
SELECT coalesce(whole.relname, part.relname) AS name, count(*)::int AS parts,
    sum(pg_total_relation_size(part.oid)) AS bytes
FROM pg_class AS part LEFT JOIN pg_inherits ON inhrelid = part.oid LEFT JOIN pg_class AS whole ON whole.oid = inhparent
WHERE part.relnamespace = current_schema()::regnamespace AND part.relkind = 'r'
GROUP BY 1 ORDER BY bytes DESC LIMIT $1
"""
_TRANSFERS = """
SELECT coalesce((SELECT transfer FROM seal ORDER BY number DESC LIMIT 1), 0) AS transfers,
    (SELECT transfer FROM seal WHERE sealed_at <= $1 ORDER BY sealed_at DESC LIMIT 1) AS before
"""
_LEDGER = """
SELECT clock_timestamp() AS now, (SELECT sealed_at FROM seal ORDER BY number DESC LIMIT 1) AS sealed_at,
    (SELECT max(finished_at) FROM verification WHERE (result ->> 'intact')::boolean) AS verified_at,
    (SELECT CASE WHEN (result ->> 'intact')::boolean THEN NULL ELSE result #>> '{fault,reason}' END
        FROM verification WHERE finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT 1) AS fault,
    (SELECT coalesce(sum(suspense), 0) FROM lease WHERE suspense > 0) AS suspense_units,
    (SELECT min(reported_at) FROM lease WHERE suspense > 0) AS suspense_since
"""
_WEBHOOKS = """
SELECT url, (SELECT count(*) FROM delivery WHERE delivery.webhook = webhook.id AND dead_at IS NOT NULL)::int AS dead,
    (SELECT count(*) FROM delivery WHERE delivery.webhook = webhook.id
        AND attempts > 1 AND delivered_at IS NULL AND dead_at IS NULL)::int AS failing, paused
FROM webhook ORDER BY created_at, id
"""
