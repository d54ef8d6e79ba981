"""What is in force, parsed once for each state: the limits document, the regions, and their settings.

A state is named by its version and by a time or a stamp, because after a restore of the database a version number comes
again with another content.
"""

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

import msgspec

from coordinator.database.connection import Connection
from coordinator.limits.read_limits import stored_document
from coordinator.limits.rules.entitlement import RegionShare, quotas_of
from coordinator.rebalancing.rules.region_settings import FloorHold, Holds, Setting, Settings
from protocol.limits.document import Quota


class Documents:
    def __init__(self) -> None:
        self._document: tuple[int, datetime | None] = 0, None
        self._quotas: Mapping[str, Quota] = {}
        self._default_plan: str | None = None
        self._catalogue: tuple[int, UUID] | None = None
        self._regions: Mapping[str, RegionShare] = {}
        self._settings: Settings = {}
        self._holds: Holds = {}

    async def at(
        self, connection: Connection, version: int, applied_at: datetime | None
    ) -> tuple[Mapping[str, Quota], str | None]:
        """Return the quotas and the default plan of a version; none before the first document was applied."""
        if (version, applied_at) != self._document:
            text = await connection.fetchval(_DOCUMENT, version, applied_at) if version else b"{}"
            document = stored_document(text, version)
            self._quotas, self._default_plan = quotas_of(document), document.default_plan
            self._document = version, applied_at
        return self._quotas, self._default_plan

    async def regions_at(
        self, connection: Connection, policy_version: int, stamp: UUID
    ) -> tuple[Mapping[str, RegionShare], Settings, Holds]:
        """Return regions, settings and holds of a version of the policies; each of their changes makes a new one."""
        if (policy_version, stamp) != self._catalogue:
            row = await connection.fetchrow(_REGIONS)
            assert row is not None
            regions = msgspec.json.decode(row["regions"], type=dict[str, RegionShare])
            settings = msgspec.json.decode(row["settings"], type=dict[str, dict[str, Setting]])
            holds = msgspec.json.decode(row["holds"], type=dict[str, dict[str, FloorHold]])
            if row["is_own"]:  # made by this transaction: after a rollback another version gets the number
                return regions, settings, holds
            self._regions, self._settings, self._holds = regions, settings, holds
            self._catalogue = row["version"], row["stamp"]
        return self._regions, self._settings, self._holds


_DOCUMENT = "SELECT document::text FROM limits_version WHERE version = $1 AND applied_at = $2"
_REGIONS = """
SELECT version, stamp, coalesce(xmin = pg_current_xact_id_if_assigned()::xid, false) AS is_own,
    coalesce((SELECT json_object_agg(name, json_build_array(status, weight)) FROM region), '{}')::text AS regions,
    coalesce((SELECT json_object_agg(key, regions) FROM (
        SELECT key, json_object_agg(region, json_build_array(weight, floor, ceiling)) AS regions
        FROM region_setting GROUP BY key) AS by_key), '{}')::text AS settings,
    coalesce((SELECT json_object_agg(quota, regions) FROM (
        SELECT quota, json_object_agg(region, json_build_array(period, units, until)) AS regions
        FROM (SELECT DISTINCT ON (quota, region) * FROM floor_hold ORDER BY quota, region, until DESC) AS newest
        GROUP BY quota) AS by_quota), '{}')::text AS holds
FROM policy_version
"""
