"""A Cluster as a region's store: a number of *cells*, each of which works like a single store.

All keys of a cell have one hash tag, so they are in one slot, and one script reaches them. When its shard fails over,
or its slot moves, the cell becomes another incarnation, and no other cell does. The cells on a primary share one
connection to it; a batch is one call for each cell.

Redirections are not followed: a call with reply MOVED was not executed, and the new node is found by asking all nodes.
That is done every second, and at once after any sign of a changed topology. When a cell's node has changed, all
connections are dropped, so that none survives a failover and failback unnoticed: each new connection reads the
fingerprint again.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import structlog

from regional_agent.cluster.rules.slot_map import Place, nodes_of, places_of
from regional_agent.store.address import StoreAddress
from regional_agent.store.call_statistics import NOT_CONNECTED, StoreCallStatistics
from regional_agent.store.connection import UNREACHABLE, Argument, OnReply, Reply, StoreConnection, StoreUnavailable
from regional_agent.store.durability import Durability, Replicas, SharedHistory
from regional_agent.store.opening import CONNECT_S, Server, StoreAccess

log = structlog.get_logger()

REFRESH_INTERVAL_S = 1.0
PAUSE_S = 0.1


class CellConnection:
    """The connection of a cell: to the node that has its slot now."""

    def __init__(self, cell: int, cluster: str, statistics: StoreCallStatistics) -> None:
        self.cell = cell
        self.link: StoreConnection | None = None
        self.reason = ""  # why no node could be asked
        self._cluster = cluster
        self._statistics = statistics
        self._durability: Durability | None = None

    @property
    def connected(self) -> bool:
        return self.link is not None and self.link.connected

    @property
    def fingerprint(self) -> str | None:
        return None if self.link is None else self.link.fingerprint

    @property
    def eviction_policy(self) -> str | None:
        return None if self.link is None else self.link.eviction_policy

    @property
    def is_noeviction_assumed(self) -> bool:
        return self.link is not None and self.link.is_noeviction_assumed

    def prove_durability(self, durability: Durability | None) -> None:
        """Set how the writes of this cell's scripts are confirmed; other cells on the node have their own way."""
        self._durability = durability

    @property
    def calls(self) -> int:
        return 0 if self.link is None else self.link.calls

    @property
    def node(self) -> str:
        return "" if self.link is None else self.link.node

    @property
    def fault(self) -> str:
        return (
            f"no node of the Cluster at {self._cluster} knows its slot's owner{self.reason}"
            if self.link is None
            else self.link.fault
        )

    async def call(self, *arguments: Argument) -> Reply:
        return await self._linked().call_with(self._durability, *arguments)

    async def call_unconfirmed(self, *arguments: Argument) -> Reply:
        return await self._linked().call_unconfirmed(*arguments)

    def send(self, arguments: Sequence[Argument], on_reply: OnReply) -> None:
        if self.link is None:
            on_reply(self._not_connected())
        else:
            self.link.send(arguments, on_reply, self._durability)

    async def read_fingerprint(self) -> str:
        return await self._linked().read_fingerprint()

    async def is_exempt(self) -> bool:
        return await self._linked().is_exempt()

    async def find_replicas(self) -> Replicas:
        return await self._linked().find_replicas()

    async def read_shared_history(self) -> SharedHistory | None:
        return await self._linked().read_shared_history()

    async def read_eviction_policy(self) -> str | None:
        return await self._linked().read_eviction_policy()

    def reconnect(self) -> None:
        if self.link is not None:
            self.link.reconnect()

    def _linked(self) -> StoreConnection:
        if self.link is None:
            raise self._not_connected()
        return self.link

    def _not_connected(self) -> StoreUnavailable:
        self._statistics.failures[NOT_CONNECTED] += 1
        return StoreUnavailable(self.fault)


class Cluster:
    def __init__(
        self,
        address: StoreAddress,
        access: StoreAccess,
        *,
        cells: int,
        timeout_ms: int,
        statistics: StoreCallStatistics,
        on_connected: Callable[[int], None],
        assumes_noeviction: bool = False,
    ) -> None:
        """`on_connected` gets the number of a cell each time that it is connected."""
        self.address = address
        self._access = access
        self._assumes_noeviction = assumes_noeviction
        self.cells = [CellConnection(cell, str(self.address), statistics) for cell in range(cells)]
        self._tags = {b"%d" % cell.cell: cell for cell in self.cells}
        self._timeout_ms = timeout_ms
        self._statistics = statistics
        self._on_connected = on_connected
        self.refresh_interval_s = REFRESH_INTERVAL_S
        self._places: dict[bytes, Place] = {}
        self._known = set(self.address.seeds)
        self._links: dict[tuple[str, int], StoreConnection] = {}
        self._unreachable: set[str] = set()  # nodes; logged once for each outage
        self._calls_before = 0
        self._refresh_now = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def calls(self) -> int:
        return self._calls_before + sum(link.calls for link in self._links.values())

    def keep(self) -> None:
        self._keeper = asyncio.create_task(self._keep(), name="cluster connections")

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._disconnect_all()

    async def _keep(self) -> None:
        while True:
            self._refresh_now.clear()
            try:
                is_whole = await self._refresh()
            except Exception:
                log.exception("Cluster topology refresh failed")
                is_whole = False
            if not is_whole:
                await asyncio.sleep(PAUSE_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self.refresh_interval_s):
                    await self._refresh_now.wait()

    async def _refresh(self) -> bool:
        """Connect to the nodes that have cells. Return False while a cell or a node is missing."""
        views = await self._read_views()
        places = places_of(self._tags, views, by_name=self.address.has_tls)
        if not places:
            return False
        self._known = nodes_of(views, by_name=self.address.has_tls) | set(self.address.seeds)
        if places != self._places:
            log.info("Cluster topology changed", shards=len({place.node for place in places.values()}))
            self._disconnect_all()
            self._places = places
            self._assign()
        await asyncio.gather(*(self._connect(link) for link in self._links.values() if not link.connected))
        return len(places) == len(self._tags) and all(link.connected for link in self._links.values())

    async def _read_views(self) -> list[tuple[str, str]]:
        """Read CLUSTER NODES of the connected nodes; if none replies, of all known ones."""
        links = {address: link for address, link in self._links.items() if link.connected}
        views = await asyncio.gather(*map(self._read_view, links.values()))
        if not any(views):
            links = {address: self._link(*address) for address in sorted(self._known)}
            views = await asyncio.gather(*map(self._read_view, links.values()))
            self._explain(next((f": {link.fault}" for link in links.values() if not link.connected), ""))
            for link in links.values():
                link.disconnect()
        return [(host, view) for (host, _), view in zip(links, views, strict=True) if view]

    def _explain(self, reason: str) -> None:
        for cell in self.cells:
            cell.reason = reason

    async def _read_view(self, link: StoreConnection) -> str:
        try:
            async with asyncio.timeout(CONNECT_S):
                if not link.connected:
                    await link.connect()
                view: bytes = await link.call("CLUSTER", "NODES")
                return view.decode()
        except UNREACHABLE:
            return ""

    def _assign(self) -> None:
        addresses = {(place.host, place.port) for place in self._places.values()}
        self._calls_before = self.calls
        self._links = {address: self._link(*address) for address in addresses}
        for tag, cell in self._tags.items():
            place = self._places.get(tag)
            cell.link = None if place is None else self._links[place.host, place.port]

    def _link(self, host: str, port: int) -> StoreConnection:
        return StoreConnection(
            Server(self.address, self._access, (host, port)),
            timeout_ms=self._timeout_ms,
            statistics=self._statistics,
            on_lost=self._refresh_now.set,
            is_node=True,
            assumes_noeviction=self._assumes_noeviction,
        )

    async def _connect(self, link: StoreConnection) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                await link.connect()
        except UNREACHABLE as error:
            link.disconnect()
            if link.node not in self._unreachable:
                self._unreachable.add(link.node)
                log.warning("Cluster node connection failed", node=link.node, reason=str(error))
            return
        self._unreachable.discard(link.node)
        log.info("Cluster node connected", node=link.node, fingerprint=link.fingerprint)
        for cell in self._of(link):
            self._on_connected(cell.cell)

    def _of(self, link: StoreConnection) -> Iterable[CellConnection]:
        return [cell for cell in self.cells if cell.link is link]

    def _disconnect_all(self) -> None:
        for link in self._links.values():
            link.disconnect()
