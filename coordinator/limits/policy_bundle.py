"""Read a policy bundle: what the agents of one region need to decide, as of one version.

It takes several statements, the version first. Even if each sees a later moment (READ COMMITTED), the contents are
never older than the version: an agent may see a change twice, but misses none.
"""

from datetime import datetime

import msgspec

from coordinator.database.connection import Connection
from coordinator.limits.read_limits import read_limits
from coordinator.limits.version import catalogue_tag
from protocol.limits.document import AllowanceQuota, LimitsDocument, OverrideTerm, PeriodKind, PolicyBundle, samples_of
from protocol.limits.requirements import requirements_of


async def policy_bundle(connection: Connection, region: str, now: datetime) -> PolicyBundle:
    """Return the bundle. A region that is not active has the weight 0.

    Future overrides are included, so that an announced one begins in a disconnected region as well.
    """
    version: int = await connection.fetchval("SELECT version FROM policy_version")
    weight, total, hold_key = await connection.fetchrow(_REGION, region) or (0, 0, b"")
    overrides = await connection.fetch(_OVERRIDES, now)
    limits = (await read_limits(connection)).document
    document = msgspec.structs.replace(limits, examples=[], decisions=msgspec.UNSET)
    return PolicyBundle(
        version=version,
        document=document,
        subscriptions={row["tenant"]: row["plan"] for row in await connection.fetch(_SUBSCRIPTIONS)},
        began_at=await _began_at(connection, document),
        weight=weight,
        total_weight=max(total, 1),
        samples=samples_of(limits),
        hold_key=hold_key,
        overrides=[OverrideTerm(**{**row, "limit": msgspec.json.decode(row["limit"])}) for row in overrides],
        requires=requirements_of(document),
    )


async def tagged_policy_bundle(connection: Connection, region: str, now: datetime) -> tuple[PolicyBundle, str]:
    """Return the bundle with its ETag."""
    return await policy_bundle(connection, region, now), f'"{region}-{await catalogue_tag(connection)}"'


async def _began_at(connection: Connection, document: LimitsDocument) -> dict[str, datetime]:
    """Return the starts of all subscriptions if a period of the document depends on them."""
    allowances = [quota for quota in document.quotas if isinstance(quota, AllowanceQuota)]
    if all(quota.period is not PeriodKind.ANNIVERSARY for quota in allowances):
        return {}
    return {row["tenant"]: row["began_at"] for row in await connection.fetch(_BEGAN_AT)}


_REGION = """
SELECT coalesce(sum(weight) FILTER (WHERE name = $1 AND status = 'active'), 0),
    coalesce(sum(weight) FILTER (WHERE status = 'active'), 0),
    (SELECT hold_key FROM region WHERE name = $1)
FROM region
"""
_SUBSCRIPTIONS = "SELECT tenant, plan FROM subscription ORDER BY tenant"
_BEGAN_AT = "SELECT tenant, began_at FROM subscription ORDER BY tenant"
# Rounded to whole milliseconds so that it begins no earlier and ends no later than here.
_OVERRIDES = """
SELECT key, value::text AS limit,
    greatest(0, ceil(extract(epoch FROM valid_from - $1) * 1000))::bigint AS starts_in_ms,
    floor(extract(epoch FROM valid_until - $1) * 1000)::bigint AS ends_in_ms
FROM limit_override WHERE valid_until IS NULL OR valid_until > $1 ORDER BY created_at, id
"""
