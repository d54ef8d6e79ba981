"""A stack whose regions and core are at different places of a network, with a standby and small disks on request."""

import itertools
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, TypeVar

from leasehold.local_stack import embedded
from leasehold.local_stack.calls import call
from leasehold.local_stack.processes import stop
from tests.chaos.network.clocks import MovableClock
from tests.chaos.network.databases import Pair
from tests.chaos.network.disks import SmallDisk
from tests.chaos.network.namespaces import NamespaceWan
from tests.chaos.network.relays import RelayWan
from tests.chaos.network.wan import CORE, Wan
from tests.chaos.pieces import AGENTS, DATABASE, REGIONS, Piece, store_of
from tests.chaos.replacing import LAME_DUCK_MS, ReplaceableStack
from tests.conftest import free_port, restricted
from tests.integration.regional_agent.cluster.clusters import Nodes, a_cluster
from tests.integration.regional_agent.store.sentinels import Watched, watched
from web.tokens import new_token

T = TypeVar("T")
TARGET = "us-east"  # where regional faults happen; it has two agents
STORE = f"store-{TARGET}"
OTHER = "eu-west"
STORE_MIB, JOURNAL_MIB = 64, 4
SECOND_PERSON = "adjust:approve"
WAITING_LANES = "/v1/lanes?waiting=true"
OPEN_ROUTE = "/v1/open-exports"
LIMIT = 10_000_000
DECISION_MS = "2000"  # a busy machine is no fault of a store
LIMITS: dict[str, Any] = {
    "plans": {"small": {}, "large": {}},
    "default_plan": "large",
    "quotas": [
        {"name": "exports", "kind": "allowance", "limit": LIMIT, "period": "month"}
        # Leases that last for a short time show each fault soon, and what is reported at once can be compared soon.
        | {"horizon": "2s", "report_within": "100ms"},
    ],
    "policies": [
        {"name": "export", "match": {"route": "/v1/exports"}, "by": ["tenant"], "quota": "exports", "wait": "1s"},
        {"name": "open-export", "match": {"route": OPEN_ROUTE}, "by": ["tenant"], "quota": "exports"}
        | {"on_store_failure": "open"},
    ],
}


class Equipment(NamedTuple):
    """Says what a stack has beyond the usual."""

    store: Literal["single", "sentinel", "cluster"] = "single"  # of the target
    has_standby: bool = False
    has_small_disks: bool = False
    has_movable_clock: bool = False  # the target's store
    knows_two_coordinators: bool = False  # so that one can be replaced


def place_of(name: str) -> str:
    """Return where a piece is."""
    return AGENTS.get(name) or {store_of(region): region for region in REGIONS}.get(name, CORE)


def wan_of_this_machine(seed: int, *, by_relays: bool = False) -> Wan:
    """Return network namespaces, or relays where those cannot be had."""
    if not by_relays:
        with suppress(OSError, subprocess.CalledProcessError):
            return NamespaceWan(REGIONS, seed)
    return RelayWan(REGIONS, seed)


class DividedStack(ReplaceableStack):
    def __init__(self, directory: Path, wan: Wan, equipment: Equipment) -> None:
        self.wan, self.equipment = wan, equipment
        self.sentinels: Watched | None = None
        self.cluster: Nodes | None = None
        self.disks: dict[str, SmallDisk] = {}
        self.clock = MovableClock(directory) if equipment.has_movable_clock else None
        self._rebased: set[tuple[int, ...]] = set()  # lanes, and the batches up to which they are
        self._exits = ExitStack()
        environ = {
            "LEASEHOLD_AGENT_JOURNAL_DIR": str(directory / "journal"),
            "LEASEHOLD_AGENT_DECISION_TIMEOUT_MS": DECISION_MS,
            "LEASEHOLD_AGENT_STORE_TIMEOUT_MS": DECISION_MS,
        }
        if equipment.knows_two_coordinators:
            environ["LEASEHOLD_AGENT_LAME_DUCK_MS"] = LAME_DUCK_MS
        super().__init__(directory, environ)
        self._tokens[SECOND_PERSON] = new_token()
        self.pair = self._make_pair() if equipment.has_standby else None
        if self.pair is not None:
            self.pieces["postgres"] = self.pair.primary
        if equipment.store != "single":
            del self.pieces[STORE]
        for name, piece in self.pieces.items():
            self._put(piece, place_of(name))
        self._put(self.spare, CORE)

    def _make_pair(self) -> Pair:
        ports = (self._ports["postgres"], free_port())
        pair = Pair(self._directory, ports, self._password, self.log_of)
        self._put(pair.standby, CORE)
        return pair

    def _put(self, piece: Piece, place: str) -> None:
        piece.start, piece.is_ready = self._at(place, piece.start), self._at(place, piece.is_ready)

    def _at(self, place: str, action: Callable[[], T]) -> Callable[[], T]:
        def act() -> T:
            with self.wan.inside(place):
                return action()

        return act

    def begin(self) -> None:
        if self.equipment.has_small_disks:
            for name, mib in ((STORE, STORE_MIB), ("journal", JOURNAL_MIB)):
                self.disks[name] = disk = SmallDisk(self._directory / name, mib)
                self._exits.callback(disk.unmount)
        with self.wan.inside(TARGET):
            if self.equipment.store == "sentinel":
                self.sentinels = self._exits.enter_context(watched(self._made("sentinels")))
            elif self.equipment.store == "cluster":
                self.cluster = self._exits.enter_context(a_cluster(self._made("cluster"), replicas=3))
                self.cluster.promote_by_themselves(after_ms=2_000)
        with self.wan.inside(CORE):
            super().begin()
        self.ask("PUT", f"{self.coordinator}/v1/limits", LIMITS)
        if self.pair is not None:
            self.add_standby(is_synchronous=True)

    def _made(self, name: str) -> Path:
        directory = self._directory / name
        directory.mkdir()
        return directory

    def end(self) -> None:
        super().end()
        if self.pair is not None and self.pair.standby.process is not None:
            stop(self.pair.standby.process, by=signal.SIGINT)
        self._exits.close()

    def ask(self, method: str, url: str, body: object = None) -> Any:
        with self.wan.inside(CORE):
            return super().ask(method, url, body)

    def fail_over(self) -> None:
        """Kill the primary of Postgres, and promote its standby."""
        assert self.pair is not None
        self.pair.primary.kill()
        with self.wan.inside(CORE):
            self.pair.promote()
        self.pieces["postgres"] = self.pair.primary

    def add_standby(self, *, is_synchronous: bool) -> None:
        """Make the server that is down, or runs as a standby, a standby of the primary."""
        assert self.pair is not None
        with self.wan.inside(CORE):
            self.pair.add_standby(is_synchronous=is_synchronous)

    def count_commits(self) -> int:
        """Return how many exchanges the ledger has booked."""
        return sum(each["last_seq"] for each in self.read("/v1/lanes?waiting=false")["data"])

    def rebase_lanes(self) -> bool:
        """Propose and approve that the lanes that wait go on. Return whether none waits any more."""
        waiting = self.read(WAITING_LANES)["data"]
        for each in waiting:
            about = {name: each[name] for name in ("epoch", "lane")}
            if (*about.values(), each["waiting_seq"]) not in self._rebased:  # its store offers the batch again soon
                proposal = about | {"kind": "rebase", "reason": "commits were lost"}
                made = self.ask("POST", f"{self.coordinator}/v1/suspense:propose", proposal)
                with self.wan.inside(CORE):
                    url = f"{self.coordinator}/v1/suspense/{made['id']}:approve"
                    answer = call("POST", url, token=self._tokens[SECOND_PERSON])
                assert answer.status < 300, answer
                self._rebased.add((*about.values(), each["waiting_seq"]))
        return not waiting

    @property
    def hours_of_store(self) -> int:
        """Return by how many hours the clock of the target's store is ahead of the machine's."""
        with self.wan.inside(TARGET):
            _, _, seconds, *_ = embedded.lines_of_store(self._ports[STORE], self._password, "TIME", 5)
        return round((int(seconds) - time.time()) / 3600)

    def fill_store(self, is_over: Callable[[], bool]) -> None:
        """Write values of a MiB into the target's store until it has ended."""
        with self.wan.inside(TARGET), suppress(OSError):
            for number in itertools.count():
                if is_over():
                    return
                embedded.send_to_store(self._ports[STORE], self._password, f"SETRANGE filler-{number} {1 << 20} x")

    # --- what differs from a stack at one place ----------------------------------------------------------------------

    @property
    def _postgres(self) -> Path:
        return super()._postgres if self.pair is None else self.pair.data

    def _database_url(self, database: str) -> str:
        return super()._database_url(database) if self.pair is None else self.pair.database_url(database)

    def _coordinators_environ(self, port: int) -> dict[str, str]:
        environ = super()._coordinators_environ(port) | {"LEASEHOLD_COORDINATOR_HOST": "0.0.0.0"}
        if self.pair is not None:
            environ["LEASEHOLD_COORDINATOR_DATABASE_URL"] = restricted(self.pair.url_of_both(DATABASE))
        return environ

    def _coordinator_for(self, region: str) -> str:
        names = self.coordinators if self.equipment.knows_two_coordinators else ("coordinator",)
        return ",".join(f"http://{self.wan.address_of_core(region, self._ports[name])}" for name in names)

    def _store_binary(self, region: str) -> Path | None:
        if region != TARGET or self.clock is None:
            return None
        return self.clock.program(embedded.store_binary())

    def _store_url(self, region: str) -> str:
        if region == TARGET and self.sentinels is not None:
            return self.sentinels.url
        if region == TARGET and self.cluster is not None:
            return self.cluster.url
        return super()._store_url(region)


@contextmanager
def running(equipment: Equipment, seed: int, *, by_relays: bool = False) -> Iterator[DividedStack]:
    """Yield a stack that runs, and end it."""
    wan = wan_of_this_machine(seed, by_relays=by_relays)
    with TemporaryDirectory() as directory:
        stack = DividedStack(Path(directory), wan, equipment)
        try:
            stack.begin()
            yield stack
        finally:
            stack.end()
            wan.close()
