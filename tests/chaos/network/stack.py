"""A stack whose regions and core are at different places of a network, with a standby and small disks on request."""

import itertools
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, TypeVar

from leasehold.local_stack import embedded
from leasehold.local_stack.processes import stop
from tests.chaos.network.databases import Pair
from tests.chaos.network.disks import SmallDisk
from tests.chaos.network.namespaces import NamespaceWan
from tests.chaos.network.relays import RelayWan
from tests.chaos.network.wan import CORE, Wan
from tests.chaos.pieces import AGENTS, DATABASE, REGIONS, Piece, Stack, store_of
from tests.conftest import free_port, restricted
from tests.integration.regional_agent.cluster.clusters import Nodes, a_cluster
from tests.integration.regional_agent.store.sentinels import Watched, watched

T = TypeVar("T")
TARGET = "us-east"  # where regional faults happen; it has two agents
STORE = f"store-{TARGET}"
OTHER = "eu-west"
STORE_MIB, JOURNAL_MIB = 64, 4
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


def place_of(name: str) -> str:
    """Return where a piece is."""
    return AGENTS.get(name) or {store_of(region): region for region in REGIONS}.get(name, CORE)


def wan_of_this_machine(seed: int) -> Wan:
    """Return network namespaces, or relays where those cannot be had."""
    try:
        return NamespaceWan(REGIONS, seed)
    except (OSError, subprocess.CalledProcessError):
        return RelayWan(REGIONS, seed)


class DividedStack(Stack):
    def __init__(self, directory: Path, wan: Wan, equipment: Equipment) -> None:
        self.wan, self.equipment = wan, equipment
        self.sentinels: Watched | None = None
        self.cluster: Nodes | None = None
        self.disks: dict[str, SmallDisk] = {}
        self._exits = ExitStack()
        environ = {
            "LEASEHOLD_AGENT_JOURNAL_DIR": str(directory / "journal"),
            "LEASEHOLD_AGENT_DECISION_TIMEOUT_MS": DECISION_MS,
            "LEASEHOLD_AGENT_STORE_TIMEOUT_MS": DECISION_MS,
        }
        super().__init__(directory, environ)
        self.pair = self._make_pair() if equipment.has_standby else None
        if self.pair is not None:
            self.pieces["postgres"] = self.pair.primary
        if equipment.store != "single":
            del self.pieces[STORE]
        for name, piece in self.pieces.items():
            self._put(piece, place_of(name))

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
        return f"http://{self.wan.address_of_core(region, self._ports['coordinator'])}"

    def _store_url(self, region: str) -> str:
        if region == TARGET and self.sentinels is not None:
            return self.sentinels.url
        if region == TARGET and self.cluster is not None:
            return self.cluster.url
        return super()._store_url(region)


@contextmanager
def running(equipment: Equipment, seed: int) -> Iterator[DividedStack]:
    """Yield a stack that runs, and end it."""
    wan = wan_of_this_machine(seed)
    with TemporaryDirectory() as directory:
        stack = DividedStack(Path(directory), wan, equipment)
        try:
            stack.begin()
            yield stack
        finally:
            stack.end()
            wan.close()
