"""What is in force, parsed once for each version: the limits document, and what people set for regions."""

from collections.abc import Mapping

import msgspec

from coordinator.database.connection import Connection
from coordinator.domain.entitlement import quotas_of
from coordinator.domain.setting import Setting, Settings
from protocol.policy import LimitsDocument, QuotaSpec


class Documents:
    def __init__(self) -> None:
        self._version = 0
        self._quotas: Mapping[str, QuotaSpec] = {}
        self._default_plan: str | None = None
        self._policy_version: int | None = None
        self._settings: Settings = {}

    async def at(self, connection: Connection, version: int) -> tuple[Mapping[str, QuotaSpec], str | None]:
        """The quotas and the default plan of a version; none before the first document was applied."""
        if version != self._version:
            text = await connection.fetchval(_DOCUMENT, version)
            document = msgspec.json.decode(text, type=LimitsDocument)
            self._quotas, self._default_plan, self._version = quotas_of(document), document.default_plan, version
        return self._quotas, self._default_plan

    async def settings_at(self, connection: Connection, policy_version: int) -> Settings:
        """Every change of a setting is another version of the policies. What is read may be newer than that."""
        if policy_version != self._policy_version:
            row = await connection.fetchrow(_SETTINGS)
            assert row is not None
            self._settings = msgspec.json.decode(row["settings"], type=dict[str, dict[str, Setting]])
            self._policy_version = row["version"]
        return self._settings


_DOCUMENT = "SELECT document::text FROM limits_version WHERE version = $1"
_SETTINGS = """
SELECT version, coalesce((SELECT json_object_agg(key, regions) FROM (
    SELECT key, json_object_agg(region, json_build_array(weight, floor, ceiling)) AS regions
    FROM region_setting GROUP BY key) AS by_key), '{}')::text AS settings
FROM policy_version
"""
