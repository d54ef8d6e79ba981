"""Which regions and agents called this coordinator, and when. It is written for all coordinators every ten seconds."""

from typing import NamedTuple

from coordinator.database.connection import Connection
from protocol.clock import Clock
from protocol.compatibility.releases import Peer

MAX_AGENTS = 1_000  # that are noted between two writes
MAX_AGENTS_KEPT = 100  # of a region: the latest


class Seen(NamedTuple):
    """When each region was seen, and each agent with what it stated, in milliseconds of the coordinator's clock."""

    regions: dict[str, int]
    agents: dict[tuple[str, str], tuple[int, Peer]]


class SeenAgents:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen = Seen({}, {})

    def note(self, region: str, peer: Peer | None) -> None:
        """Note a call with a token of this region, and what its agent stated."""
        now_ms = self._clock.monotonic_ms()
        self._seen.regions[region] = now_ms
        if peer is not None and peer.name and len(self._seen.agents) < MAX_AGENTS:
            self._seen.agents[region, peer.name] = now_ms, peer

    def take(self) -> Seen:
        """Return what was noted since the last time."""
        seen, self._seen = self._seen, Seen({}, {})
        return seen

    def put_back(self, seen: Seen) -> None:
        """Note again what could not be written."""
        self._seen = Seen(seen.regions | self._seen.regions, seen.agents | self._seen.agents)

    async def write(self, connection: Connection, seen: Seen) -> None:
        """Write how long ago each was seen. The latest time of any coordinator counts."""
        now_ms = self._clock.monotonic_ms()
        if seen.regions:
            names = sorted(seen.regions)
            await connection.execute(_NOTE_REGIONS, names, [now_ms - seen.regions[name] for name in names])
        if seen.agents:
            rows = [
                (*name, peer.release, ",".join(sorted(peer.capabilities)), now_ms - at_ms)
                for name, (at_ms, peer) in sorted(seen.agents.items())
            ]
            await connection.execute(_NOTE_AGENTS, *map(list, zip(*rows, strict=True)))


async def forget_old_agents(connection: Connection) -> None:
    """Keep the agents that were seen within a day, and the latest of each region."""
    await connection.execute(_FORGET_AGENTS, MAX_AGENTS_KEPT)


_NOTE_REGIONS = """
INSERT INTO region_last_seen (region, last_seen_at)
SELECT region.name, clock_timestamp() - make_interval(secs => seen.ago_ms / 1000.0)
FROM unnest($1::text[], $2::bigint[]) AS seen (name, ago_ms) JOIN region USING (name)
ORDER BY region.name
ON CONFLICT (region) DO UPDATE SET last_seen_at = greatest(region_last_seen.last_seen_at, excluded.last_seen_at)
"""
_NOTE_AGENTS = """
INSERT INTO region_agent (region, agent, release, capabilities, last_seen_at)
SELECT region.name, seen.agent, seen.release, string_to_array(seen.capabilities, ','),
    clock_timestamp() - make_interval(secs => seen.ago_ms / 1000.0)
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bigint[])
    AS seen (name, agent, release, capabilities, ago_ms) JOIN region USING (name)
ORDER BY region.name, seen.agent
ON CONFLICT (region, agent) DO UPDATE
SET release = excluded.release, capabilities = excluded.capabilities, last_seen_at = excluded.last_seen_at
WHERE region_agent.last_seen_at <= excluded.last_seen_at
"""
_FORGET_AGENTS = """
DELETE FROM region_agent USING (
    SELECT region, agent, row_number() OVER (PARTITION BY region ORDER BY last_seen_at DESC) AS place FROM region_agent
) AS known
WHERE (region_agent.region, region_agent.agent) = (known.region, known.agent)
    AND (known.place > $1 OR region_agent.last_seen_at < clock_timestamp() - interval '1 day')
"""
