"""One cell of the region's store, with everything that decides by it, leases for it and reports of it.

A single store is one cell. A Cluster has several, which are independent: a failover, a migration or an outage of one
does not affect the others.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from protocol.check import NO_COSTS
from protocol.circuit_breaker import CircuitBreaker
from protocol.clock import Clock
from regional_agent.admission.engine import AdmissionEngine
from regional_agent.admission.key_states import KeyStates
from regional_agent.admission.rules.hold_ids import HoldId
from regional_agent.admission.token_slices import TokenSlices
from regional_agent.decision_log.recorder import DecisionRecorder
from regional_agent.leasing.coordinator_client import CoordinatorClient
from regional_agent.leasing.epoch import EpochManager
from regional_agent.leasing.exchange import LaneExchange
from regional_agent.leasing.exchange_loop import ExchangeLoop
from regional_agent.leasing.pacing import Pacing
from regional_agent.leasing.quotas import Quotas
from regional_agent.leasing.shutdown import Shutdown
from regional_agent.metrics import AgentMetrics
from regional_agent.settings import AgentSettings
from regional_agent.shared_limits.resets import Resets
from regional_agent.shared_limits.share_loop import ShareLoop
from regional_agent.store.check_calls import CheckBatcher
from regional_agent.store.circuit_breaker import StoreCircuitBreaker
from regional_agent.store.connection import Store, StoreUnavailable
from regional_agent.store.scripts import Scripts
from regional_agent.store.sources import library_in, shipped_library
from regional_agent.store.types import Fenced, HoldState, KnownOperation, Operation, StoreIncarnation
from regional_agent.store_outage.booking import JournalBooking
from regional_agent.store_outage.fallback import OutageFallback
from regional_agent.store_outage.journal import Journal
from regional_agent.traces.agent_traces import AgentTraces


class Cell:
    def __init__(
        self,
        number: int | None,
        store: Store,
        journal: Journal,
        coordinator: CoordinatorClient,
        metrics: AgentMetrics,
        settings: AgentSettings,
        clock: Clock,
        keys: KeyStates,
        recorder: DecisionRecorder,
        traces: AgentTraces | None = None,
    ) -> None:
        """`number`: the cell's number in a Cluster; None in a single store. `keys`: those of all cells of the agent."""
        self.number = number
        self._clock = clock
        self.store = store
        self.journal = journal
        self.metrics = metrics
        library = shipped_library() if settings.store_library is None else library_in(settings.store_library)
        self.scripts = Scripts(store, number, library)
        breaker = CircuitBreaker(settings.breaker_failures, settings.breaker_pause_ms)
        self.breaker = StoreCircuitBreaker(breaker, clock, metrics, self.scripts.probe, settings.breaker_pause_ms)
        self.epochs = EpochManager(
            store,
            self.scripts,
            coordinator,
            on_established=self.breaker.record_success,
            confirms_in_replicas=settings.store_confirm_in_replicas,
        )
        self.quotas = Quotas(clock)
        self._traces = traces
        checks = self.scripts.checks
        batcher = CheckBatcher(traces.around_checks(checks) if traces else checks, self.breaker)
        self.share_loop = ShareLoop(settings.name, self.scripts, self.epochs, keys, coordinator, metrics, clock)
        self.slices = TokenSlices(batcher, self.epochs, self.share_loop, clock)
        fallback = OutageFallback(journal, metrics, clock, settings.workers)
        self.admission = AdmissionEngine(
            batcher,
            self.epochs,
            self.quotas,
            self.slices,
            self.share_loop,
            fallback,
            metrics,
            clock,
            keys,
            recorder,
            settings.adjust_ceiling,
        )
        booking = JournalBooking(journal, fallback.allowances, coordinator, self.scripts, self.breaker, clock)
        self.resets = Resets(self.scripts, self.epochs, metrics, self.slices.return_key, self.admission.forget)
        self._set_up_exchanges(booking, coordinator, settings.report_interval_ms)

    def _set_up_exchanges(self, booking: JournalBooking, coordinator: CoordinatorClient, interval_ms: int) -> None:
        pacing = Pacing(self.quotas.wake, self._clock, interval_ms)
        self.exchange = LaneExchange(
            scripts=self.scripts,
            coordinator=coordinator,
            quotas=self.quotas,
            epochs=self.epochs,
            pacing=pacing,
            metrics=self.metrics,
            clock=self._clock,
            traces=self._traces,
        )
        self.exchange_loop = ExchangeLoop(
            scripts=self.scripts,
            exchange=self.exchange,
            quotas=self.quotas,
            epochs=self.epochs,
            journal=booking,
            pacing=pacing,
            metrics=self.metrics,
            clock=self._clock,
        )
        self.shutdown = Shutdown(
            scripts=self.scripts,
            exchange=self.exchange,
            quotas=self.quotas,
            epochs=self.epochs,
            journal=booking,
            pacing=pacing,
        )

    def count_set_aside(self) -> int:
        now_ms = self._clock.monotonic_ms()
        return len(self.quotas.set_aside.items(now_ms)) + len(self.share_loop.set_aside.items(now_ms))

    def refusals(self) -> list[str]:
        """Describe what the coordinator refused and what is set aside for now, the newest first."""
        now_ms = self._clock.monotonic_ms()
        lanes = [
            f"lane {lane} of epoch {epoch} is refused: {stop.reason}"
            for (epoch, lane), stop in self.exchange.lanes.stopped.items()
            if stop.reason
        ]
        shares = [
            f"the share of {each.name} is refused: {each.reason}" for each in self.share_loop.set_aside.items(now_ms)
        ]
        demands = [f"leases of {each.name} are refused: {each.reason}" for each in self.quotas.set_aside.items(now_ms)]
        return [*lanes, *reversed(demands), *reversed(shares)]

    async def update_hold(
        self, hold: HoldId, action: str, amount: int | None = 0, costs: Mapping[str, int] = NO_COSTS
    ) -> HoldState:
        """Apply an action to what a hold has set aside here, as `Scripts.update_hold` does.

        Raises StoreUnavailable or StoreError.
        """
        incarnation = self._current_incarnation()
        with self._invalidating():
            state = await self.scripts.update_hold(incarnation.fingerprint, hold, action, amount, costs)
        if hold.epoch != incarnation.epoch:
            self.exchange_loop.report_older_epochs()
        for part in hold.parts:
            if part.algorithm == "allowance" and action in ("commit", "release"):
                self.quotas.return_surplus_later(part.quota)  # units of a central quota that the hold did not use
        return state

    async def find_operation(self, operation: Operation) -> KnownOperation | None:
        """Read the record of an operation over several cells. Raises OperationConflict or StoreUnavailable."""
        incarnation = self._current_incarnation()
        with self._invalidating():
            return await self.scripts.find_operation(incarnation, operation)

    async def replace_operation(
        self, operation: Operation, before: HoldId, hold: HoldId, *, is_concluded: bool
    ) -> bool:
        """Record how far the operation has come. Return False if another request has changed the record."""
        incarnation = self._current_incarnation()
        with self._invalidating():
            return await self.scripts.replace_operation(incarnation, operation, before, hold, is_concluded=is_concluded)

    def _current_incarnation(self) -> StoreIncarnation:
        if self.epochs.current is None:
            raise StoreUnavailable("the region has no epoch yet")
        return self.epochs.current

    @contextmanager
    def _invalidating(self) -> Iterator[None]:
        try:
            yield
        except Fenced:
            self.epochs.invalidate()
            raise StoreUnavailable("the region's store began another incarnation; ask again") from None

    async def leave(self, *, return_unspent: bool) -> None:
        """Stop deciding, report what was spent, and give the journal back. The loops have ended already."""
        await self.admission.close()
        self.slices.close()
        self.breaker.close()
        await self.shutdown.run(return_unspent=return_unspent)
        self.journal.release()
