"""Book the outage journal: through the same exchange as other usage, in an epoch of its own.

A segment's name opens the epoch, and its batches are the same each time they are sent, so it is booked once, however
often its agent dies on the way. If the store is available, the units that were admitted without it are first returned
from its leases: else the leases would admit the same units again.

The store may have charged operations of the journal all the same, so it is asked before they are booked: a segment with
operations waits for the store. When the store would have forgotten them, the segment is booked without asking.
"""

import msgspec
import structlog

from protocol.clock import Clock
from protocol.messages import Exchange, ExchangeRequest, FrozenBatch, OpenEpoch
from protocol.outcomes import ExchangeOutcome
from regional_agent.leasing.coordinator_client import CoordinatorClient, CoordinatorRefused
from regional_agent.store.circuit_breaker import StoreCircuitBreaker
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import Operation, OperationClaim, StoreIncarnation
from regional_agent.store_outage.journal import Journal, Segment, units_of
from regional_agent.store_outage.rules.local_allowances import LocalAllowances
from regional_agent.store_outage.rules.records import OperationIdentity, ReadSegment, batches

log = structlog.get_logger()

RETRY_MS = 30_000
# Booked now or before; or kept for an operator to resolve, because its epoch was retired.
BOOKED = {ExchangeOutcome.APPLIED, ExchangeOutcome.REPLAYED, ExchangeOutcome.STALE, ExchangeOutcome.RETIRED}


class JournalBooking:
    def __init__(
        self,
        journal: Journal,
        allowances: LocalAllowances,
        coordinator: CoordinatorClient,
        scripts: Scripts,
        breaker: StoreCircuitBreaker,
        clock: Clock,
    ) -> None:
        self._journal = journal
        self._allowances = allowances
        self._coordinator = coordinator
        self._scripts = scripts
        self._breaker = breaker
        self._clock = clock
        self._recover_at_ms = clock.monotonic_ms() + RETRY_MS
        self._returned: set[str] = set()  # segments whose units were returned from the store's leases
        self._retry_at_ms: dict[str, int] = {}  # of refused segments, which stay on disk for an operator
        self._waits_since_ms: dict[str, int] = {}  # segments whose operations the store has not been asked about

    async def book(self, incarnation: StoreIncarnation | None) -> None:
        """Book all sealed segments, and seal the current one once the store is available again."""
        if self._clock.monotonic_ms() >= self._recover_at_ms:
            self._recover_at_ms = self._clock.monotonic_ms() + RETRY_MS
            self._journal.recover()
        is_back = incarnation is not None and self._breaker.allows_calls()
        if is_back:
            self._journal.seal()
        for segment in list(self._journal.sealed):
            if self._clock.monotonic_ms() >= self._retry_at_ms.get(segment.name, 0):
                await self._book(segment, incarnation if is_back else None)

    async def book_last(self, incarnation: StoreIncarnation | None) -> None:
        """Book what there is, at shutdown."""
        await self._journal.settle()
        await self.book(incarnation)

    async def _book(self, segment: Segment, incarnation: StoreIncarnation | None) -> None:
        content = await self._decided(segment, incarnation)
        if content is None:
            return
        try:
            refusal = await self._send_all(segment, content, incarnation)
        except CoordinatorRefused as refused:
            refusal = str(refused)
        if refusal is not None:
            self._retry_at_ms[segment.name] = self._clock.monotonic_ms() + RETRY_MS
            log.error("outage journal segment refused", segment=segment.name, reason=refusal)
            return
        self._waits_since_ms.pop(segment.name, None)
        if self._journal.drop(segment, content):
            for entry in content.admitted:
                self._allowances.take_back(entry.quota, entry.units)

    async def _decided(self, segment: Segment, incarnation: StoreIncarnation | None) -> ReadSegment | None:
        """Return a segment once its booked part is certain and on disk; None while the store must be asked."""
        content = await segment.content()
        if not self._journal.is_own(segment, content):
            return None
        if content.is_decided:
            return content
        now_ms = self._clock.monotonic_ms()
        since_ms = self._waits_since_ms.setdefault(segment.name, now_ms)
        is_forgotten = now_ms - since_ms > max(each.remembered_ms for each in content.operations)
        if incarnation is None and not is_forgotten:
            return None
        charged = [] if incarnation is None else await self._charged_by_store(segment, content, incarnation)
        try:
            return await self._journal.decide(segment, charged)
        except OSError as error:
            self._retry_at_ms[segment.name] = now_ms + RETRY_MS
            log.error("outage journal write failed", segment=segment.name, reason=str(error))
            return None

    async def _charged_by_store(
        self, segment: Segment, content: ReadSegment, incarnation: StoreIncarnation
    ) -> list[OperationIdentity]:
        """Claim all operations of the segment. Return those that a script, or another journal, has charged."""
        operations = content.operations
        claims = await self._scripts.claim_operations(
            incarnation, segment.name, [Operation(each.digest, each.body, each.remembered_ms) for each in operations]
        )
        by_identity = dict(zip((each.identity for each in operations), claims, strict=True))
        charged = [identity for identity, claim in by_identity.items() if claim is OperationClaim.CHARGED]
        misused = sum(claim is OperationClaim.ANOTHER_BODY for claim in claims)
        if charged:
            log.info(
                "outage journal operations were charged by the store", segment=segment.name, operations=len(charged)
            )
        if misused:
            log.warning(
                "outage journal operation ids were reused with another body", segment=segment.name, operations=misused
            )
        return charged

    async def _send_all(
        self, segment: Segment, content: ReadSegment, incarnation: StoreIncarnation | None
    ) -> str | None:
        """Send all batches of a segment. Return why it was refused; None if it was booked."""
        if not any(content.entries):
            return None  # nothing was written after it was begun, or the store has charged all of it
        opening = OpenEpoch(nonce=segment.name, fingerprint=f"journal:{segment.name}", lost_data=False, journal=True)
        opened = await self._coordinator.open_epoch(opening)
        if incarnation is not None:
            await self._return_units(segment, content, incarnation)
        refusals: dict[int, str] = {}  # by lane: batches behind a refused one wait, and other lanes go on
        for batch in batches(content.entries, opened.epoch, opened.lanes):
            if batch.lane not in refusals:
                refusal = await self._send(batch, opening.fingerprint)
                refusals |= {} if refusal is None else {batch.lane: refusal}
        if refusals:
            return "; ".join(f"lane {lane}: {reason}" for lane, reason in refusals.items())
        log.info("outage journal segment booked", segment=segment.name, epoch=opened.epoch, units=units_of(content))
        return None

    async def _send(self, batch: FrozenBatch, fingerprint: str) -> str | None:
        """Return why a batch was not booked; None if it was."""
        exchange = Exchange(frozen=msgspec.json.encode(batch).decode())
        request = ExchangeRequest(fingerprint=fingerprint, exchanges=[exchange])
        try:
            [reply] = (await self._coordinator.exchange(request)).replies
        except CoordinatorRefused as refused:
            if not refused.is_about_content:
                raise
            return str(refused)
        if reply.outcome in BOOKED:
            return None
        return f"{reply.outcome.value}: {reply.fault.reason}" if reply.fault is not None else reply.outcome.value

    async def _return_units(self, segment: Segment, content: ReadSegment, incarnation: StoreIncarnation) -> None:
        """Return as many units as were admitted, once. The exchange loop reports it after this booking."""
        if segment.name in self._returned:
            return
        for (quota, period), units in _by_lease(content).items():
            await self._scripts.return_units(incarnation, quota, 0, period=period, most=units)
        self._returned.add(segment.name)


def _by_lease(content: ReadSegment) -> dict[tuple[str, str], int]:
    units: dict[tuple[str, str], int] = {}
    for entry in content.entries:
        units[entry.quota, entry.period] = units.get((entry.quota, entry.period), 0) + entry.units
    return units
