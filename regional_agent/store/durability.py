"""How a store confirms that the writes of a script are safe: on its disk, or in its replicas.

A reply that is not confirmed counts as not answered in time. So what a crash may lose was never answered to a service.

Replicas confirm by their replication offsets. After a script the store says how far its history goes, then `WAIT` lets
the replicas acknowledge that, and then the store lists what each of them has acknowledged. `WAIT` alone counts replicas
and does not name them. It waits for the last write of its own connection, so a write goes before it: a script that only
read may have read what another connection wrote a moment ago.

The list names no processes, only addresses, at which another process may listen by now. So no link may have been made
since the replicas were asked who they are: the store counts the links that it makes.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

Reply = Any
Command = Sequence[bytes | str | int]

NEVER_PROMOTED = "0" * 40  # the second replication id of a store that was never a replica
READS_LINKS: Command = ("INFO", "replication", "stats")


class Durability(Protocol):
    """The commands that follow each script, and the test whether their replies confirm its writes."""

    name: str

    def commands(self, timeout_s: float) -> Sequence[Command]: ...
    def is_confirmed(self, replies: Sequence[Reply | Exception]) -> bool: ...


class OnDisk:
    """The store has flushed its writes."""

    name = "the store's disk"

    def commands(self, timeout_s: float) -> Sequence[Command]:
        return [("WAITAOF", 1, 0, _milliseconds(timeout_s))]

    def is_confirmed(self, replies: Sequence[Reply | Exception]) -> bool:
        (reply,) = replies
        return isinstance(reply, list) and bool(reply) and reply[0] == 1


class Link(NamedTuple):
    """A replica as its primary lists it."""

    host: str
    port: int


class Links(NamedTuple):
    """The replicas that follow a store, how far each is, and how many links the store has made since it started."""

    made: str  # by full and by partial synchronisations, such as `2.0`
    acknowledged: dict[Link, int]


class Replicas(NamedTuple):
    """The processes that replicate a store: each with its link."""

    by_run_id: dict[str, Link]
    links_made: str  # as long as it stays so, the links lead to the same processes, and none was a primary meanwhile


class InReplicas:
    """All of these replicas have acknowledged the writes."""

    name = "a replica of the store"

    def __init__(self, links: Sequence[Link], links_made: str, key: bytes) -> None:
        """`key`: what is written so that replicas acknowledge what was written before it."""
        self._links = tuple(links)
        self._made = links_made
        self._key = key
        self.confirmed_offset = 0  # the most that all of them had acknowledged when a reply was passed on

    def commands(self, timeout_s: float) -> Sequence[Command]:
        wait = ("WAIT", len(self._links), _milliseconds(timeout_s))
        return [("INFO", "replication"), ("SET", self._key, 1), wait, READS_LINKS]

    def is_confirmed(self, replies: Sequence[Reply | Exception]) -> bool:
        written, _, _, acknowledged = replies
        if not isinstance(written, bytes) or not isinstance(acknowledged, bytes):
            return False
        offset, links = int(find_field(written, b"master_repl_offset") or -1), read_links(acknowledged)
        if offset < 0 or links.made != self._made:
            return False
        if any(links.acknowledged.get(link, -1) < offset for link in self._links):
            return False
        self.confirmed_offset = max(self.confirmed_offset, offset)
        return True


def _milliseconds(timeout_s: float) -> int:
    return max(1, int(timeout_s * 1000))


# --- what INFO says ---------------------------------------------------------------------------------------------------


class SharedHistory(NamedTuple):
    """The history that a primary has in common with the one that it replaced, when it was that one's replica."""

    history: str  # its id
    offset: int  # how far the replica had it


def read_links(info: bytes) -> Links:
    """Read the links that are up. Two replicas with one address cannot be told apart, so neither is listed."""
    found: dict[Link, int] = {}
    listed: Counter[Link] = Counter()
    for line in info.splitlines():
        name, _, text = line.decode(errors="replace").partition(":")
        if name.startswith("slave") and name.removeprefix("slave").isdecimal():
            fields = dict(pair.partition("=")[::2] for pair in text.split(","))
            link = Link(fields["ip"], int(fields["port"]))
            listed[link] += 1
            if fields.get("state") == "online":
                found[link] = int(fields["offset"])
    made = ".".join(find_field(info, name) or "?" for name in (b"sync_full", b"sync_partial_ok"))
    return Links(made, {link: each for link, each in found.items() if listed[link] == 1})


def shared_history(replication: bytes) -> SharedHistory | None:
    """Return the shared history, or None for a store that is no primary or was never promoted."""
    history = find_field(replication, b"master_replid2")
    first_own = int(find_field(replication, b"second_repl_offset") or -1)
    is_primary = find_field(replication, b"role") == "master"
    if not is_primary or history is None or history == NEVER_PROMOTED or first_own < 1:
        return None
    return SharedHistory(history, first_own - 1)


def find_field(info: bytes, name: bytes) -> str | None:
    for line in info.splitlines():
        key, _, value = line.partition(b":")
        if key == name:
            return value.decode()
    return None
