"""A Cluster as a region's store: a number of *cells*, each of which is what a single store is.

All keys of a cell have one hash tag, so they are in one slot, and one script reaches them. Its shard may fail over, and
its slot may be moved: then it is another incarnation, and no other cell does. One connection to each primary is shared
by the cells that are there; what is gathered in one turn is one call for each cell.

Nothing follows a redirection: a call that was told MOVED was not executed, and where it should be asked is found out
by asking the nodes. That is done every second, and at once after any sign of a changed topology. When a place has
changed all connections are left, so that none survives a failover and failback unseen: whoever is connected again
reads the fingerprint anew.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import structlog

from regional_agent.cluster.rules.slot_map import Place, nodes_of, places_of
from regional_agent.store.connection import (
    UNREACHABLE,
    Argument,
    OnReply,
    Reply,
    StoreAddress,
    StoreConnection,
    StoreUnavailable,
)
from regional_agent.store.rules.decision_timeout import DecisionTimeout

log = structlog.get_logger()

SCHEME = "redis+cluster://"
LOOK_AGAIN_S = 1.0
PAUSE_S = 0.1
CONNECT_S = 2.0


class ClusterAddress:
    """`redis+cluster://:password@host:port,host:port`: some of the nodes; the others are heard of from them."""

    def __init__(self, url: str) -> None:
        if not url.startswith(SCHEME):
            raise ValueError(f"a Cluster's address begins with {SCHEME}")
        user, at, hosts = url.removeprefix(SCHEME).rpartition("@")
        self._user = user + at
        self.seeds = [self._seed(host) for host in hosts.rstrip("/").split(",")]

    def _seed(self, host: str) -> tuple[str, int]:
        address = StoreAddress(f"redis://{self._user}{host}")
        if not host or address.database or address.path:
            raise ValueError(f"a Cluster's address is {SCHEME}host:port,host:port, and it has no databases")
        return address.host, address.port

    def url(self, host: str, port: int) -> str:
        return f"redis://{self._user}{f'[{host}]' if ':' in host else host}:{port}"

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.seeds)


class CellConnection:
    """Where a cell's scripts are sent: to whichever node has its slot now."""

    def __init__(self, cell: int, cluster: str) -> None:
        self.cell = cell
        self.link: StoreConnection | None = None
        self._cluster = cluster

    @property
    def connected(self) -> bool:
        return self.link is not None and self.link.connected

    @property
    def fingerprint(self) -> str | None:
        return None if self.link is None else self.link.fingerprint

    @property
    def eviction_policy(self) -> str | None:
        return None if self.link is None else self.link.eviction_policy

    def prove_durability(self, *, is_wanted: bool) -> None:
        """A Cluster is never exempt: each failover begins another incarnation."""
        assert not is_wanted

    @property
    def calls(self) -> int:
        return 0 if self.link is None else self.link.calls

    @property
    def node(self) -> str:
        return "" if self.link is None else self.link.node

    @property
    def fault(self) -> str:
        return f"no node of the Cluster at {self._cluster} says who has it" if self.link is None else self.link.fault

    async def call(self, *arguments: Argument) -> Reply:
        return await self._linked().call(*arguments)

    def send(self, arguments: Sequence[Argument], on_reply: OnReply) -> None:
        if self.link is None:
            on_reply(StoreUnavailable(self.fault))
        else:
            self.link.send(arguments, on_reply)

    async def read_fingerprint(self) -> str:
        return await self._linked().read_fingerprint()

    async def is_exempt(self) -> bool:
        return await self._linked().is_exempt()

    async def read_eviction_policy(self) -> str | None:
        return await self._linked().read_eviction_policy()

    def reconnect(self) -> None:
        if self.link is not None:
            self.link.reconnect()

    def _linked(self) -> StoreConnection:
        if self.link is None:
            raise StoreUnavailable(self.fault)
        return self.link


class Cluster:
    def __init__(
        self,
        url: str,
        *,
        cells: int,
        timeout_ms: int,
        decision_timeout: DecisionTimeout,
        on_connected: Callable[[int], None],
    ) -> None:
        """`on_connected` is told the number of a cell that can be asked from now on, again each time."""
        self.address = ClusterAddress(url)
        self.cells = [CellConnection(cell, str(self.address)) for cell in range(cells)]
        self._tags = {b"%d" % cell.cell: cell for cell in self.cells}
        self._timeout_ms = timeout_ms
        self._decision_timeout = decision_timeout
        self._on_connected = on_connected
        self.look_again_s = LOOK_AGAIN_S
        self._places: dict[bytes, Place] = {}
        self._known = set(self.address.seeds)
        self._links: dict[tuple[str, int], StoreConnection] = {}
        self._missed: set[str] = set()  # said once for each outage
        self._calls_before = 0
        self._look_now = asyncio.Event()
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
        self._leave_all()

    async def _keep(self) -> None:
        while True:
            self._look_now.clear()
            try:
                is_whole = await self._look()
            except Exception:
                log.exception("the Cluster cannot be looked at")
                is_whole = False
            if not is_whole:
                await asyncio.sleep(PAUSE_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self.look_again_s):
                    await self._look_now.wait()

    async def _look(self) -> bool:
        """Be connected to whoever has a cell. False while somebody is missing."""
        told = await self._told()
        places = places_of(self._tags, told)
        if not places:
            return False
        self._known = nodes_of(told) | set(self.address.seeds)
        if places != self._places:
            log.info("the Cluster's places are read", shards=len({place.node for place in places.values()}))
            self._leave_all()
            self._places = places
            self._assign()
        await asyncio.gather(*(self._connect(link) for link in self._links.values() if not link.connected))
        return len(places) == len(self._tags) and all(link.connected for link in self._links.values())

    async def _told(self) -> list[tuple[str, str]]:
        """What the connected nodes say; if none is, whatever nodes are known of."""
        links = [link for link in self._links.values() if link.connected]
        told = await asyncio.gather(*map(self._ask, links))
        if not any(told):
            strangers = [self._link(*address) for address in sorted(self._known)]
            told = await asyncio.gather(*map(self._ask, strangers))
            links = strangers
            for stranger in strangers:
                stranger.leave()
        return [(link.address.host, text) for link, text in zip(links, told, strict=True) if text]

    async def _ask(self, link: StoreConnection) -> str:
        try:
            async with asyncio.timeout(CONNECT_S):
                if not link.connected:
                    await link.connect()
                answer: bytes = await link.call("CLUSTER", "NODES")
                return answer.decode()
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
            self.address.url(host, port),
            timeout_ms=self._timeout_ms,
            decision_timeout=self._decision_timeout,
            on_lost=self._look_now.set,
            is_node=True,
        )

    async def _connect(self, link: StoreConnection) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                await link.connect()
        except UNREACHABLE as error:
            link.leave()
            if str(link.address) not in self._missed:
                self._missed.add(str(link.address))
                log.warning("a node of the Cluster cannot be reached", node=str(link.address), reason=str(error))
            return
        self._missed.discard(str(link.address))
        log.info("a node of the Cluster is connected", node=str(link.address), fingerprint=link.fingerprint)
        for cell in self._of(link):
            self._on_connected(cell.cell)

    def _of(self, link: StoreConnection) -> Iterable[CellConnection]:
        return [cell for cell in self.cells if cell.link is link]

    def _leave_all(self) -> None:
        for link in self._links.values():
            link.leave()
