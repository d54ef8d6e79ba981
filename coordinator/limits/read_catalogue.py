"""Read what is in force for some quota keys: limits, plans, overrides, regions and settings."""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

import asyncpg
import msgspec

from coordinator.database.connection import Connection
from coordinator.limits.in_force import Documents
from coordinator.limits.rules.entitlement import Catalogue, calendar_of_key, tenant_of
from coordinator.outages import DecisionOutdated
from protocol.identifiers import parse_quota_key, wider_keys
from protocol.limits.document import AllowanceQuota, LimitValue, Quota
from protocol.periods import Calendar, Period, period_of


async def read_catalogue(
    connection: Connection, documents: Documents, quotas: Collection[str], now: datetime
) -> Catalogue:
    """Return what is in force now, as far as these quota keys are concerned."""
    row = await connection.fetchrow(CATALOGUE, *arguments_of_catalogue(quotas, now))
    assert row is not None
    return await catalogue_of_row(connection, documents, row, quotas)


async def confirm_catalogue(
    connection: Connection,
    documents: Documents,
    catalogue: Catalogue,
    version: int,
    quotas: Collection[str],
    now: datetime,
) -> Catalogue:
    """Return the catalogue in force, if it decides on these quota keys as the one that was read before the locks did.

    `version` was read by a statement that began when the locks were held, along with something else: so no more is read
    as long as the catalogue did not change. Raise DecisionOutdated if a change concerns these keys.
    """
    if version == catalogue.version:
        return catalogue
    newer = await read_catalogue(connection, documents, quotas, now)
    if not newer.decides_like(catalogue):
        raise DecisionOutdated(f"the catalogue changed from version {catalogue.version} to {newer.version}")
    return newer


def arguments_of_catalogue(quotas: Collection[str], now: datetime) -> tuple[list[str], list[str], datetime]:
    """Return the first three parameters of CATALOGUE."""
    tenants = {tenant for quota in quotas if (tenant := tenant_of(quota)) is not None}
    keys = {key for quota in quotas for key in wider_keys(quota)}
    return list(tenants), list(keys), now


async def catalogue_of_row(
    connection: Connection, documents: Documents, row: asyncpg.Record, quotas: Collection[str]
) -> Catalogue:
    """Complete a row of CATALOGUE by the document and the calendars that it refers to."""
    specs, default_plan = await documents.at(connection, row["document_version"], row["applied_at"])
    began_at = msgspec.json.decode(row["began_at"], type=dict[str, datetime])
    plans = msgspec.json.decode(row["plans"], type=dict[str, str])
    overrides = msgspec.json.decode(row["overrides"], type=dict[str, LimitValue])
    regions, settings, holds = await documents.regions_at(connection, row["version"], row["stamp"])
    calendars = _calendars_with_zones(specs, began_at, quotas)
    return Catalogue(
        row["version"],
        specs,
        default_plan,
        plans,
        regions,
        overrides,
        row["block_version"],
        settings,
        began_at,
        await _read_written_periods(connection, calendars) if calendars else {},
        holds,
    )


def _calendars_with_zones(
    specs: Mapping[str, Quota], began_at: Mapping[str, datetime], quotas: Iterable[str]
) -> dict[str, Calendar]:
    """Return by name the calendars whose written periods may differ from what their time zone's rules say now."""
    calendars = {
        calendar_of_key(began_at, spec, quota)
        for quota in quotas
        if isinstance(spec := specs.get(parse_quota_key(quota)[0]), AllowanceQuota) and spec.time_zone != "UTC"
    }
    return {str(calendar): calendar for calendar in calendars}


async def _read_written_periods(
    connection: Connection, calendars: Mapping[str, Calendar]
) -> dict[Calendar, tuple[Period, ...]]:
    rows = await connection.fetch(_WRITTEN_PERIODS, list(calendars))
    return {calendars[row["calendar"]]: tuple(map(period_of, row["ids"])) for row in rows}


# $1: tenants, $2: keys that an override may be for, $3: now
CATALOGUE = """
SELECT version, stamp,
    coalesce((SELECT max(version) FROM limits_version), 0) AS document_version,
    (SELECT applied_at FROM limits_version ORDER BY limits_version.version DESC LIMIT 1) AS applied_at,
    coalesce((SELECT json_object_agg(tenant, plan) FROM subscription WHERE tenant = ANY ($1::text[])), '{}')::text
        AS plans,
    coalesce((SELECT json_object_agg(tenant, began_at) FROM subscription WHERE tenant = ANY ($1::text[])), '{}')::text
        AS began_at,
    (SELECT version FROM block_version) AS block_version,
    coalesce((
        SELECT json_object_agg(key, value) FROM (
            SELECT DISTINCT ON (key) key, value FROM limit_override
            WHERE key = ANY ($2::text[]) AND valid_from <= $3 AND (valid_until IS NULL OR valid_until > $3)
            ORDER BY key, created_at DESC, id DESC) AS newest), '{}')::text AS overrides
FROM policy_version
"""
_WRITTEN_PERIODS = """
SELECT calendar, (SELECT array_agg(id) FROM (
    SELECT id FROM period WHERE period.calendar = asked.calendar ORDER BY ends_at DESC LIMIT 4) AS newest) AS ids
FROM unnest($1::text[]) AS asked (calendar)
WHERE EXISTS (SELECT FROM period WHERE period.calendar = asked.calendar)
"""
