"""What every route of the coordinator works with. `main` builds one; nothing is kept in module globals."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated
from uuid import UUID

from fastapi import Depends, Request

from coordinator.access.authenticate import Caller, Credential, authenticate
from coordinator.access.callers import Callers
from coordinator.access.jwt_callers import JwtCallers, note_identity
from coordinator.archives.store import ArchiveStore, open_store
from coordinator.database.engine import Database
from coordinator.decision_log.store import DecisionStore
from coordinator.exchange.batcher import ExchangeBatcher
from coordinator.exchange.budgets import Budgets
from coordinator.exchange.rules.budget import Budget
from coordinator.exchange.rules.granting import LeaseTerms
from coordinator.exchange.rules.plausibility import ClaimBounds
from coordinator.exchange.rules.submissions import ExchangeCall
from coordinator.exchange.transaction import Applied, apply_exchanges
from coordinator.health.monitor import CoordinatorHealth
from coordinator.limits.in_force import Documents
from coordinator.metrics import CoordinatorMetrics
from coordinator.refusals import Refusals
from coordinator.settings import CoordinatorSettings
from coordinator.signals import SignalHub
from protocol.clock import Clock
from web.credentials.jwt_claims import JwtIdentity
from web.credentials.verify_jwt import JwtVerifier
from web.diagnosis.self_diagnosis import SelfDiagnosis
from web.traces.context import Kind, within
from web.traces.tracing import Tracing

LOCK_TIMEOUT_MS = 1_000  # of an exchange: those that are batched with it wait as long
# A coordinator that hangs holds the locks of its exchanges for so long. Those that wait for them outlast it.
IDLE_TIMEOUT_MS = 500
IDLE_TIMEOUT_PER_LEASE_MS = 1  # many times what it takes to decide one


@dataclass(frozen=True)
class Coordinator:
    settings: CoordinatorSettings
    clock: Clock
    database: Database
    hub: SignalHub
    metrics: CoordinatorMetrics
    health: CoordinatorHealth
    diagnosis: SelfDiagnosis
    decisions: DecisionStore
    tracing: Tracing | None = None
    documents: Documents = field(default_factory=Documents)
    replaying: asyncio.Lock = field(default_factory=asyncio.Lock)  # one replay of traffic at a time
    archives: ArchiveStore | None = field(init=False)
    batcher: ExchangeBatcher = field(init=False)
    jwt_verifier: JwtVerifier | None = None
    callers: Callers = field(init=False)
    jwt_callers: JwtCallers | None = field(init=False)
    refusals: Refusals = field(init=False)
    budgets: Budgets = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "archives", open_store(self.settings.archive))
        object.__setattr__(self, "batcher", ExchangeBatcher(self._apply))
        object.__setattr__(self, "callers", Callers(self._look_up))
        jwt_callers = None if self.jwt_verifier is None else JwtCallers(self.jwt_verifier, self._note_identity)
        object.__setattr__(self, "jwt_callers", jwt_callers)
        refusals = Refusals(self.metrics.refused_items, lambda: self.clock.monotonic_ms() / 1000)
        object.__setattr__(self, "refusals", refusals)
        per_minute = {budget: getattr(self.settings, f"{budget.value}_per_minute") for budget in Budget}
        budgets = Budgets(per_minute, self.clock.monotonic_ms, self.metrics.note_over_budget)
        object.__setattr__(self, "budgets", budgets)

    async def _apply(self, calls: Sequence[ExchangeCall]) -> list[Applied]:
        causes = [call.cause for call in calls if call.cause is not None]
        if self.tracing is None or not causes:
            with within(None):  # a task that books for all was begun within one of the requests
                return await self._book(calls)
        with self.tracing.around("transaction", causes, Kind.INTERNAL, {"leasehold.calls": len(calls)}):
            return await self._book(calls)

    async def _book(self, calls: Sequence[ExchangeCall]) -> list[Applied]:
        settings, now = self.settings, self.clock.now()
        claims = ClaimBounds(settings.implausible_limit_factor, settings.implausible_floor_units)
        terms = LeaseTerms(settings.lease_ms, settings.late_usage_days, claims)
        with self.metrics.exchange_seconds.time():
            return await self.database.run(
                lambda c: apply_exchanges(c, self.documents, calls, terms, now, self.budgets),
                lock_timeout_ms=LOCK_TIMEOUT_MS,
                idle_timeout_ms=IDLE_TIMEOUT_MS + IDLE_TIMEOUT_PER_LEASE_MS * _count_leases(calls),
            )

    async def _look_up(self, credentials: Collection[Credential]) -> dict[Credential, Caller]:
        return await self.database.read(lambda c: authenticate(c, credentials))

    async def _note_identity(self, id_: UUID, identity: JwtIdentity) -> None:
        now = self.clock.now()
        await self.database.run(lambda c: note_identity(c, id_, identity, now))


def _count_leases(calls: Sequence[ExchangeCall]) -> int:
    return sum(len(each.batch.leases) + len(each.demands) for call in calls for each in call.submissions)


async def coordinator_of(request: Request) -> Coordinator:
    """Return the coordinator. This is a coroutine since FastAPI calls plain functions in a thread, at every request."""
    found = request.app.state.coordinator
    assert isinstance(found, Coordinator)
    return found


# As the type of a route's argument: FastAPI hands the coordinator in, and keeps it out of the OpenAPI document.
CoordinatorDep = Annotated[Coordinator, Depends(coordinator_of)]
