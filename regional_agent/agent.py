"""The composition of one agent: its parts, and the loops that it runs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from heapq import nlargest
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import structlog
from msgspec.structs import replace

from protocol.blocks import BlockList
from protocol.check import Check, ExplainAnswer
from protocol.circuit_breaker import BreakerState
from protocol.clock import Clock
from protocol.diagnosis.checks import UnknownSetting
from protocol.limits.document import PolicyBundle
from protocol.messages import ResetBatch, Versions
from regional_agent.admission.blocks import Blocks
from regional_agent.admission.engine import Admission
from regional_agent.admission.explain import explain_check
from regional_agent.admission.holds import Holds
from regional_agent.admission.key_states import KeyStates
from regional_agent.admission.policies import Policies, edges_ms
from regional_agent.admission.rules.hold_ids import HoldSeal
from regional_agent.cluster.cell import Cell
from regional_agent.cluster.multi_cell import MultiCellAdmission
from regional_agent.cluster.rules.cells import CELLS, cell_of
from regional_agent.decision_log.losses import Losses
from regional_agent.decision_log.recorder import DecisionRecorder
from regional_agent.decision_log.sender import DecisionSender
from regional_agent.diagnosis.gather import examine_agent
from regional_agent.envoy.door.clients import GrpcClient
from regional_agent.health import AgentHealth
from regional_agent.leasing.coordinator_client import CoordinatorClient
from regional_agent.leasing.feeds import Feed
from regional_agent.leasing.rules.demand import HotKey
from regional_agent.leasing.rules.reading import SetAside, read_blocks, read_bundle, read_whole
from regional_agent.leasing.signals import SignalListener
from regional_agent.metrics import MAX_HOT_KEYS, AgentMetrics
from regional_agent.settings import AgentSettings, journal_of
from regional_agent.store.address import StoreSetup
from regional_agent.store.call_statistics import StoreCallStatistics
from regional_agent.store.connection import Store, StoreConnection
from regional_agent.store.opening import Server
from regional_agent.store.rules.decision_timeout import DecisionTimeout
from regional_agent.store.sentinel import Sentinels
from regional_agent.store.topology import Cluster
from regional_agent.store.watch import StoreWatch
from regional_agent.store_outage.journal import Journal, JournalDirectory
from regional_agent.store_outage.rules.records import owner_of
from regional_agent.tls import tls_of
from regional_agent.traces.agent_traces import open_traces
from web.credentials.verify_jwt import JwtVerifier
from web.diagnosis.self_diagnosis import SelfDiagnosis

if TYPE_CHECKING:
    from regional_agent.envoy.quota.streams import RateLimitQuotaService

log = structlog.get_logger()

RETRY_S = 0.2


class RegionalAgent:
    proxy_quotas: "RateLimitQuotaService | None" = None  # of the gRPC door

    def __init__(self, settings: AgentSettings, clock: Clock, unknown: Sequence[UnknownSetting] = ()) -> None:
        """`unknown`: variables of the environment that look like settings, and that no setting reads."""
        self.settings = settings
        self._clock = clock
        self.decision_timeout = DecisionTimeout(settings.decision_timeout_ms, settings.decision_timeout_max_ms)
        self._store_calls = StoreCallStatistics(self.decision_timeout)
        self.metrics = AgentMetrics(self._store_calls)
        self.tls = tls_of(settings, self.metrics.registry)
        self.coordinator = self._coordinator_client()
        self.traces = open_traces(settings, self.metrics.traces)
        self._keys = KeyStates(clock)
        losses = Losses(self.metrics.registry, clock)
        self.recorder = DecisionRecorder(clock, losses, settings.decision_log_rows_per_second)
        self._decisions = self._decision_sender(losses)
        self.store, stores = self._connections()
        self.cells = [self._cell(number, store) for number, store in stores]
        self._spread = MultiCellAdmission(self.cells, self.metrics, self.recorder)
        self.admission: Admission = self.cells[0].admission if len(self.cells) == 1 else self._spread
        self.holds = Holds(self.cell_of, HoldSeal(), self.metrics, self._allowance_limit, settings.adjust_ceiling)
        self._signals = SignalListener(coordinator=self.coordinator, cells=self.cells, cell_of=self.cell_of)
        self._policies = Feed(
            "policies",
            read_bundle,
            poll=self.coordinator.policies,
            put_in_force=self._put_policies_in_force,
            edges_ms=edges_ms,
            clock=clock,
            state_dir=settings.state_dir,
        )
        self._blocks = Feed(
            "blocks",
            read_blocks,
            poll=self.coordinator.blocks,
            put_in_force=self._put_blocks_in_force,
            edges_ms=lambda _: (),  # each block is compared with the clock when it is used
            clock=clock,
            state_dir=settings.state_dir,
        )
        self._resets = Feed(
            "resets",
            read_whole(ResetBatch),
            poll=self.coordinator.resets,
            put_in_force=self._distribute_resets,
            edges_ms=lambda _: (),
            clock=clock,
            state_dir=None,  # the store knows which it has
        )
        terms = settings.jwt_terms()
        self.jwt_verifier = None if terms is None else JwtVerifier(terms, self.metrics.registry)
        self.grpc_clients: Callable[[], Sequence[GrpcClient]] = list  # of the gRPC door, if there is one
        self.health = AgentHealth(self, clock)
        self.diagnosis = SelfDiagnosis(partial(examine_agent, self, clock, unknown), clock)
        for cell in self.cells:
            cell.exchange.settlement.on_versions = self._on_versions

    def _coordinator_client(self) -> CoordinatorClient:
        own = self.settings
        return CoordinatorClient(
            own.coordinator_urls, own.coordinator_token, own.region, own.name, self.tls.coordinator
        )

    def _decision_sender(self, losses: Losses) -> DecisionSender:
        return DecisionSender(
            self.recorder,
            losses,
            self.coordinator,
            self._clock,
            self.settings.name,
            policies=lambda: self.admission.policies,
            most_bytes=self.settings.decision_log_max_bytes,
        )

    def _connections(self) -> tuple[StoreConnection | Cluster, Sequence[tuple[int | None, Store]]]:
        """Return what keeps the connections, and the store of each cell."""
        settings, address, access = self.settings, self.settings.store_address(), self.settings.store_access()
        if address.setup is StoreSetup.CLUSTER:
            cluster = Cluster(
                address,
                access,
                cells=CELLS,
                timeout_ms=settings.store_timeout_ms,
                statistics=self._store_calls,
                assumes_noeviction=settings.store_assume_noeviction,
                on_connected=self._invalidate,
            )
            return cluster, list(enumerate(cluster.cells))
        single = StoreConnection(
            Sentinels(address, access) if address.setup is StoreSetup.SENTINEL else Server(address, access),
            timeout_ms=settings.store_timeout_ms,
            statistics=self._store_calls,
            assumes_noeviction=settings.store_assume_noeviction,
            on_connected=partial(self._invalidate, 0),
        )
        return single, [(None, single)]

    def _cell(self, number: int | None, store: Store) -> Cell:
        journal = _journal(self.settings, number, self._clock, self.metrics)
        shared = self.coordinator, self.metrics, self.settings, self._clock, self._keys, self.recorder, self.traces
        return Cell(number, store, journal, *shared)

    def cell_of(self, quota: str) -> Cell:
        return self.cells[0 if len(self.cells) == 1 else cell_of(quota)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the agent, from the first connection to the last exchange."""
        self.store.keep()
        parts: list[BackgroundLoop] = [self._signals, self._policies, self._blocks, self._resets]
        parts += [self.health, self.diagnosis]
        parts += [self.coordinator] if len(self.coordinator.addresses.known) > 1 else []
        if self.settings.decision_log_rows_per_second:
            parts.append(self._decisions)
        for cell in self.cells:
            parts += (cell.epochs, cell.exchange_loop, cell.share_loop, StoreWatch(cell.store, cell.breaker))
            parts += (cell.scripts.library, cell.resets)
        if self.jwt_verifier is not None:
            parts.append(self.jwt_verifier.keys)
        loops = [asyncio.create_task(_forever(part), name=type(part).__name__) for part in parts]
        try:
            yield
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await self._spread.close()
            await asyncio.gather(
                *(cell.leave(return_unspent=self.settings.return_on_stop) for cell in self.cells),
            )
            await self._decisions.close()
            await self.coordinator.close()
            await self.store.close()
            if self.traces is not None:
                await asyncio.to_thread(self.traces.tracing.close)

    async def explain(self, check: Check) -> ExplainAnswer:
        """Explain a check in a thread: a document may have thousands of policies. Raises NoPoliciesYet."""
        return await asyncio.to_thread(explain_check, self.admission, check, self._clock.monotonic_ms())

    def _allowance_limit(self, quota: str) -> int | None:
        policies = self.admission.policies
        return None if policies is None else policies.allowance_limit(quota)

    def _invalidate(self, cell: int) -> None:
        self.cells[cell].epochs.invalidate()

    def _put_policies_in_force(self, bundle: PolicyBundle, age_ms: int) -> None:
        policies = Policies(bundle, age_ms, self._keys, self._clock.now())
        self.recorder.follow(bundle)
        if bundle.hold_key:
            self.holds.seal.use(bundle.hold_key)
        for cell in self.cells:
            cell.journal.belong_to(owner_of(self.settings.region, bundle.hold_key))
            cell.admission.policies = cell.share_loop.policies = policies
            cell.slices.return_all()
            cell.quotas.set_central(policies.central)
            cell.quotas.retry_all()  # a limit may have been raised

    def _put_blocks_in_force(self, listed: BlockList, age_ms: int) -> None:
        blocks = Blocks(listed, self._clock.monotonic_ms() - age_ms)
        for cell in self.cells:
            cell.admission.blocks = blocks

    def _distribute_resets(self, batch: ResetBatch, _age_ms: int) -> None:
        """Give each cell the keys that lie in it."""
        for cell in self.cells:
            mine = (replace(each, keys=[key for key in each.keys if self.cell_of(key) is cell]) for each in batch.data)
            cell.resets.add(each for each in mine if each.keys)

    def _on_versions(self, versions: Versions) -> None:
        self._policies.on_version(versions.policies)
        self._blocks.on_version(versions.blocks)

    @property
    def coordinator_release(self) -> str | None:
        """The release that the coordinator stated last."""
        return None if self.coordinator.peer is None else self.coordinator.peer.release

    @property
    def set_aside(self) -> Sequence[SetAside]:
        """The policies, quotas and blocks that this release cannot read."""
        return [*self._policies.set_aside, *self._blocks.set_aside]

    @property
    def has_epochs(self) -> bool:
        return all(cell.epochs.current is not None for cell in self.cells)

    def unreported_age_ms(self) -> int:
        """Return the age of the oldest usage that is not booked yet; 0 if none is due."""
        return max(cell.exchange.unreported_ms() for cell in self.cells)

    def breaker(self) -> BreakerState:
        """Return the worst state of all cells."""
        return max((cell.breaker.state for cell in self.cells), key=_WORST.index)

    def hottest(self, most: int) -> list[HotKey]:
        found = [key for cell in self.cells for key in cell.quotas.hottest(most)]
        return nlargest(most, found + self._keys.hottest(most), key=attrgetter("demand_milli"))

    def measure(self) -> None:
        """Set the gauges, which are read when metrics are scraped."""
        managers, policies = [cell.epochs for cell in self.cells], self.admission.policies
        self.metrics.epochs.current.set(max((each.current.epoch for each in managers if each.current), default=0))
        self.metrics.epochs.refused(next((each.refused for each in managers if each.refused), ""))
        self.metrics.stopped_lanes.set(sum(len(cell.exchange_loop.stopped_lanes) for cell in self.cells))
        self.metrics.refusals.turned_away.set(sum(cell.quotas.turned_away for cell in self.cells))
        self.metrics.refusals.set_aside.set(sum(cell.count_set_aside() for cell in self.cells))
        self.metrics.policy_version.set(policies.version if policies else 0)
        self.metrics.block_version.set(self.admission.blocks.version if self.admission.blocks is not None else 0)
        self.metrics.unreported_seconds.set(self.unreported_age_ms() / 1000)
        self.metrics.store_calls.set(self.store.calls)
        self.metrics.library.show(cell.scripts.library for cell in self.cells)
        self.metrics.breaker.state(self.breaker())
        self.metrics.coordinator_addresses.show(self.coordinator.addresses)
        self.metrics.hot_keys.show(self.hottest(MAX_HOT_KEYS))
        self.health.measure()
        if self.proxy_quotas is not None:
            self.proxy_quotas.measure(self.metrics.proxy_quotas)
        self._measure_configuration()
        now_ms = self._clock.monotonic_ms()
        failing_ms = max(cell.quotas.contact.failing_ms(now_ms) for cell in self.cells)
        self.metrics.exchanges_failing.set(failing_ms / 1000)
        self.metrics.journal.stored.set(sum(cell.journal.stored_bytes for cell in self.cells))
        self.metrics.degraded_seconds.set(max(cell.breaker.degraded_ms() for cell in self.cells) / 1000)

    def _measure_configuration(self) -> None:
        configuration, policies = self.metrics.configuration, self.admission.policies
        ages_ms = {feed.name: feed.age_ms for feed in (self._policies, self._blocks, self._resets)}
        configuration.show_ages({name: ms / 1000 for name, ms in ages_ms.items() if ms is not None})
        configuration.policies.set(policies.count if policies else 0)
        configuration.keys.set(len(self._keys))
        configuration.followed.set(sum(cell.quotas.count_followed() for cell in self.cells))


_WORST = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


def _journal(settings: AgentSettings, cell: int | None, clock: Clock, metrics: AgentMetrics) -> Journal:
    """Return the outage journal of a cell. Each is booked when its own cell decides again."""
    path = journal_of(settings)
    if path is not None and cell is not None:
        path /= f"cell-{cell}"
    disk = JournalDirectory(path) if path is not None else None
    limits = {"most_bytes": settings.journal_max_bytes, "most_ms": settings.journal_max_ms}
    return Journal(disk, clock, metrics.journal, **limits)


class BackgroundLoop(Protocol):
    async def run(self) -> None:
        """Run until cancelled."""


async def _forever(part: BackgroundLoop) -> None:
    """Run a loop, and start it again after an unexpected error."""
    while True:
        try:
            await part.run()
        except Exception:
            log.exception("agent loop failed", loop=type(part).__name__)
        await asyncio.sleep(RETRY_S)
