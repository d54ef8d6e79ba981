"""The limits document in force, parsed once for each version: a version's document never changes."""

from collections.abc import Mapping

import msgspec

from coordinator.database.connection import Connection
from coordinator.domain.entitlement import quotas_of
from protocol.policy import LimitsDocument, QuotaSpec


class Documents:
    def __init__(self) -> None:
        self._version = 0
        self._quotas: Mapping[str, QuotaSpec] = {}
        self._default_plan: str | None = None

    async def at(self, connection: Connection, version: int) -> tuple[Mapping[str, QuotaSpec], str | None]:
        """The quotas and the default plan of a version; none before the first document was applied."""
        if version != self._version:
            text = await connection.fetchval(_DOCUMENT, version)
            document = msgspec.json.decode(text, type=LimitsDocument)
            self._quotas, self._default_plan, self._version = quotas_of(document), document.default_plan, version
        return self._quotas, self._default_plan


_DOCUMENT = "SELECT document::text FROM limits_version WHERE version = $1"
