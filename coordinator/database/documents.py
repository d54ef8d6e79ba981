"""What is in force, parsed once for each version: the limits document, the regions, and what people set for them."""

from collections.abc import Mapping

import msgspec

from coordinator.database.connection import Connection
from coordinator.domain.entitlement import RegionShare, quotas_of
from coordinator.domain.setting import Setting, Settings
from protocol.policy import LimitsDocument, QuotaSpec


class Documents:
    def __init__(self) -> None:
        self._version = 0
        self._quotas: Mapping[str, QuotaSpec] = {}
        self._default_plan: str | None = None
        self._policy_version: int | None = None
        self._regions: Mapping[str, RegionShare] = {}
        self._settings: Settings = {}

    async def at(self, connection: Connection, version: int) -> tuple[Mapping[str, QuotaSpec], str | None]:
        """The quotas and the default plan of a version; none before the first document was applied."""
        if version != self._version:
            text = await connection.fetchval(_DOCUMENT, version)
            document = msgspec.json.decode(text, type=LimitsDocument)
            self._quotas, self._default_plan, self._version = quotas_of(document), document.default_plan, version
        return self._quotas, self._default_plan

    async def regions_at(
        self, connection: Connection, policy_version: int
    ) -> tuple[Mapping[str, RegionShare], Settings]:
        """Every change of a region or a setting is another version of the policies. What is read may be newer."""
        if policy_version != self._policy_version:
            row = await connection.fetchrow(_REGIONS)
            assert row is not None
            regions = msgspec.json.decode(row["regions"], type=dict[str, RegionShare])
            settings = msgspec.json.decode(row["settings"], type=dict[str, dict[str, Setting]])
            if row["is_own"]:  # this transaction made it: if it is rolled back, another one will have that number
                return regions, settings
            self._regions, self._settings, self._policy_version = regions, settings, row["version"]
        return self._regions, self._settings


_DOCUMENT = "SELECT document::text FROM limits_version WHERE version = $1"
_REGIONS = """
SELECT version, coalesce(xmin = pg_current_xact_id_if_assigned()::xid, false) AS is_own,
    coalesce((SELECT json_object_agg(name, json_build_array(status, weight)) FROM region), '{}')::text AS regions,
    coalesce((SELECT json_object_agg(key, regions) FROM (
        SELECT key, json_object_agg(region, json_build_array(weight, floor, ceiling)) AS regions
        FROM region_setting GROUP BY key) AS by_key), '{}')::text AS settings
FROM policy_version
"""
