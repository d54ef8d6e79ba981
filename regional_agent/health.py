"""Whether this agent can enforce limits, for `/readyz`, `/v1/status`, the metrics and the log.

A reason has a code, which programs and alerts compare, and a text for people. It either makes the agent `not_ready`
(most of what it is asked would be denied or could not be counted) or only `degraded`.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from heapq import nsmallest
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import structlog

from protocol.circuit_breaker import BreakerState
from protocol.clock import Clock
from protocol.compatibility.releases import RELEASE
from protocol.identifiers import name_of_quota
from protocol.outcomes import EpochRefusal
from regional_agent.cluster.cell import Cell
from regional_agent.leasing.rules.headroom import Headroom, dry_in_s, headroom_of
from regional_agent.store.connection import KEEPS_ALL, StoreError, StoreUnavailable
from web.declared_metrics import DeclaredMetrics, gauge
from web.health import Health, HealthReason, HealthStatus

if TYPE_CHECKING:
    from regional_agent.agent import RegionalAgent

log = structlog.get_logger()

WATCH_S = 0.5
REFRESH_INTERVAL_S = 0.01
REFUSED_FOR_MS = 10_000  # refused exchanges only degrade the region for so long: its leases last
MOST_LEASES = 100  # of each cell that are read
MOST_SHOWN = 20  # quotas in a metric
MOST_NAMES = 10  # that a reason lists
READ_LEASES_MS = 5_000


_WORST_FIRST = (HealthStatus.NOT_READY, HealthStatus.DEGRADED)


class AgentFinding(NamedTuple):
    code: str
    text: str
    severity: HealthStatus = HealthStatus.NOT_READY


def _degrading(code: str, text: str) -> AgentFinding:
    return AgentFinding(code, text, HealthStatus.DEGRADED)


_NO_EPOCH: Mapping[str, AgentFinding] = {
    EpochRefusal.REGION_DOWN: AgentFinding("region_down", "the region has no epoch: its status is down"),
    EpochRefusal.TWO_STORES: AgentFinding(
        "two_stores", "the region has no epoch: two stores answer under its name; see docs/guides/operations.md"
    ),
}


class HealthMetrics(DeclaredMetrics):
    _ready = gauge("leasehold_ready", "1: the agent can enforce, as /readyz says; also while degraded.")
    _reasons = gauge("leasehold_health_reason", "1: why the agent is degraded or not ready.", "code", "severity")

    def show(self, findings: Iterable[AgentFinding]) -> None:
        findings = list(findings)
        self._ready.set(worst_of(findings) is not HealthStatus.NOT_READY)
        self._reasons.clear()
        for each in findings:
            self._reasons.labels(each.code, each.severity.value).set(1)


class AgentHealth:
    """Checks the agent's parts twice a second, and on each request for its health."""

    def __init__(self, region: "RegionalAgent", clock: Clock) -> None:
        self._region = region
        self._clock = clock
        self._metrics = HealthMetrics(region.metrics.registry)
        self._since: dict[tuple[str, str], datetime] = {}
        self._noted: tuple[HealthStatus, frozenset[str]] = HealthStatus.READY, frozenset()  # logged last
        self._headroom: dict[int | None, Headroom] = {}
        self._dry_in_s: dict[int | None, dict[str, float]] = {}
        self._leases_read_at_ms: dict[int | None, int] = {}
        self.is_shutting_down = False
        self._is_slow = False

    async def run(self) -> None:
        while True:
            await asyncio.gather(*(self._look_at_leases(cell) for cell in self._region.cells))
            self._note_change(self.health())
            self._note_slow_store()
            await asyncio.sleep(WATCH_S)

    def shut_down(self) -> None:
        """Report not ready from now on, so that load balancers remove the agent before the listener closes."""
        self.is_shutting_down = True

    def health(self) -> Health:
        """Return the state at this moment. A reason's `since` is when it was first found."""
        findings, now = self.findings(), self._clock.now()
        self._since = {each[:2]: self._since.get(each[:2], now) for each in findings}
        reasons = [HealthReason(code=each.code, since=self._since[each[:2]], text=each.text) for each in findings]
        return Health(status=worst_of(findings), reasons=reasons)

    def measure(self) -> None:
        self._metrics.show(self.findings())
        shortest: dict[str, float] = {}
        for of_cell in self._dry_in_s.values():
            for quota, seconds in of_cell.items():
                shortest[quota] = min(seconds, shortest.get(quota, seconds))
        self._region.metrics.headroom.show(dict(nsmallest(MOST_SHOWN, shortest.items(), key=itemgetter(1))))

    def findings(self) -> list[AgentFinding]:
        return list(dict.fromkeys(self._found()))

    def _found(self) -> Iterator[AgentFinding]:
        if self.is_shutting_down:
            yield AgentFinding("shutting_down", "the agent is shutting down")
        for cell in self._region.cells:
            yield from store_findings(cell)
            yield from self._coordinator_findings(cell)
        for address in self._region.coordinator.addresses.known:
            if address.is_tls_fault:
                yield _degrading("coordinator_tls_failed", f"TLS with {address.url} fails: {address.fault}")
        for each in self._region.tls.certificates.look(self._clock.now()):
            yield _degrading(each.code, each.text)
        if self._region.admission.policies is None:
            yield AgentFinding("no_policies", "no policies have arrived yet")
        if self._region.admission.blocks is None:
            yield AgentFinding("no_blocks", "no block list has arrived yet")
        verifier = self._region.jwt_verifier
        if verifier is not None and verifier.keys.finding:
            yield _degrading("jwt_keys_stale", verifier.keys.finding)
        yield from self._unread_findings()

    def _unread_findings(self) -> Iterator[AgentFinding]:
        """Yield what this release cannot read. Items without an earlier version are not enforced."""
        found = self._region.set_aside
        if not found:
            return
        names = ", ".join(each.item for each in found[:MOST_NAMES]) + (" and more" if len(found) > MOST_NAMES else "")
        is_enforced = all(each.is_kept for each in found)
        consequence = "their last known versions are in force" if is_enforced else "not all of them are enforced"
        text = f"this release ({RELEASE}) cannot read {names}: {consequence}; upgrade the agent"
        yield _degrading("newer_policies", text) if is_enforced else AgentFinding("newer_policies", text)

    def _coordinator_findings(self, cell: Cell) -> Iterator[AgentFinding]:
        contact, now_ms = cell.quotas.contact, self._clock.monotonic_ms()
        if contact.is_draining:
            yield AgentFinding("region_drained", "the region is drained or down: its leases have been returned")
        if cell.count_set_aside():
            yield _degrading("items_set_aside", "the coordinator refused items, which are set aside; see /v1/status")
        if not contact.is_lost(now_ms):
            return
        headroom = self._headroom.get(cell.number, Headroom())
        if contact.is_refused:
            text = f"the coordinator refuses this region's exchanges: {contact.reason}"
            is_long = contact.failing_ms(now_ms) >= REFUSED_FOR_MS or headroom.is_exhausted
            yield AgentFinding("exchanges_refused", text) if is_long else _degrading("exchanges_refused", text)
        elif headroom.is_exhausted:
            yield AgentFinding(
                "leases_exhausted", "the region is cut off from the coordinator, and its leases are spent or expired"
            )
        else:
            yield _degrading("cut_off", "the region is cut off from the coordinator; it spends the leases that it has")

    async def _look_at_leases(self, cell: Cell) -> None:
        """Read the leases in demand: twice a second while the region is cut off, and otherwise for the metrics."""
        now_ms = self._clock.monotonic_ms()
        is_lost = cell.quotas.contact.is_lost(now_ms)
        if not is_lost:
            self._headroom.pop(cell.number, None)
            if now_ms < self._leases_read_at_ms.get(cell.number, -READ_LEASES_MS) + READ_LEASES_MS:
                return
        self._leases_read_at_ms[cell.number] = now_ms
        try:
            leases = await _read_leases(cell)
        except (StoreUnavailable, StoreError):
            self._dry_in_s.pop(cell.number, None)
            return
        self._dry_in_s[cell.number] = _dry_in_s(cell, leases)
        if is_lost:
            self._headroom[cell.number] = headroom_of((each.fields, each.mono_us) for each in leases)

    def _note_slow_store(self) -> None:
        """Log once when decisions take longer than the configured timeout, and again after a recovery."""
        timeout = self._region.decision_timeout
        if timeout.is_too_short and not self._is_slow:
            p99_ms, waits_ms = (round(1000 * each, 1) for each in (timeout.quantile_s(99), timeout.seconds))
            set_ms = self._region.settings.decision_timeout_ms
            log.warning(
                "the store is slower than the decision time-out", p99_ms=p99_ms, set_ms=set_ms, waits_ms=waits_ms
            )
        self._is_slow = timeout.is_too_short

    def _note_change(self, health: Health) -> None:
        """Log the status when it changes, and also when a reason begins or ends while the status stays the same."""
        reasons = {reason.code: reason.text for reason in health.reasons}
        noted = health.status, frozenset(reasons)
        if noted == self._noted:
            return
        self._noted = noted
        write = log.info if health.status is HealthStatus.READY else log.warning
        write(f"agent is {health.status.value.replace('_', ' ')}", reasons=reasons)


class _ReadLease(NamedTuple):
    quota: str
    fields: Mapping[str, str]
    mono_us: int


async def _read_leases(cell: Cell) -> list[_ReadLease]:
    """Read the leases of the quotas that are most in demand."""
    incarnation = cell.epochs.current
    if incarnation is None:
        return []
    quotas = cell.quotas.in_demand(MOST_LEASES)
    mono_us = await cell.scripts.read_mono_us()
    leases = await asyncio.gather(*(cell.scripts.lease_fields(incarnation, quota) for quota in quotas))
    return [_ReadLease(quota, fields, mono_us) for quota, fields in zip(quotas, leases, strict=True)]


def _dry_in_s(cell: Cell, leases: Iterable[_ReadLease]) -> dict[str, float]:
    """Return by the names of quotas how soon the first of their leases is spent.

    An allowance that is used up to its limit is left out: it is dry, and nothing is wrong.
    """
    found: dict[str, float] = {}
    for each in leases:
        seconds = dry_in_s(each.fields, each.mono_us, cell.quotas.demand_milli(each.quota))
        if seconds is not None and not cell.quotas.outlook(each.quota).is_exhausted:
            name = name_of_quota(each.quota)
            found[name] = min(seconds, found.get(name, seconds))
    return found


def store_findings(cell: Cell) -> Iterator[AgentFinding]:
    """Yield what is wrong with the cell's store, epoch, lanes and journal."""
    store, epochs = cell.store, cell.epochs
    if not store.connected:
        yield AgentFinding("store_unreachable", store.fault)
    elif cell.scripts.library.refusal:
        yield AgentFinding("store_functions_refused", cell.scripts.library.refusal)
    elif store.eviction_policy is None:
        text = "allowances are not admitted: the store's INFO shows no maxmemory_policy, and no setting vouches for it"
        yield AgentFinding("store_evicts", text)
    elif store.eviction_policy != KEEPS_ALL:
        text = (
            f"allowances are not admitted: the store's maxmemory-policy is {store.eviction_policy} and not {KEEPS_ALL}"
        )
        yield AgentFinding("store_evicts", text)
    elif cell.breaker.state is not BreakerState.CLOSED:
        yield AgentFinding("store_failing", f"the store does not decide: {cell.breaker.reason}")
    if epochs.current is None:
        of = "" if cell.number is None else f" for cell {cell.number} of its Cluster"
        because = f": {epochs.fault}" if epochs.fault else ""
        yield _NO_EPOCH.get(epochs.refused, AgentFinding("no_epoch", f"the region has no epoch{of}{because}"))
    else:
        yield from _lane_findings(cell, epochs.current.epoch, epochs.current.lanes)
    if cell.journal.fault is not None:
        yield AgentFinding("journal_failing", f"allowances fail closed: {cell.journal.fault}")
    if cell.journal.foreign:
        text = f"{len(cell.journal.foreign)} journals of another region or installation lie in this one's directory"
        yield _degrading("journal_foreign", text)


def _lane_findings(cell: Cell, epoch: int, lanes: int) -> Iterator[AgentFinding]:
    stopped = sum(each == epoch for each, _ in cell.exchange_loop.stopped_lanes)
    if stopped == 0:
        return
    text = f"a lane has stopped; see /v1/status ({stopped} of {lanes})"
    yield AgentFinding("lanes_stopped", text) if stopped >= lanes else _degrading("lanes_stopped", text)


def worst_of(findings: Iterable[AgentFinding]) -> HealthStatus:
    severities = {each.severity for each in findings}
    return next((each for each in _WORST_FIRST if each in severities), HealthStatus.READY)


def merged(healths: Mapping[int, Health]) -> Health:
    """Return the health of an agent of several workers: the worst status, and each reason with its workers."""
    since: dict[tuple[str, str], datetime] = {}
    workers: dict[tuple[str, str], list[int]] = {}
    for number, health in healths.items():
        for reason in health.reasons:
            key = reason.code, reason.text
            since[key] = min(since.get(key, reason.since), reason.since)
            workers.setdefault(key, []).append(number)
    statuses = {health.status for health in healths.values()}
    return Health(
        status=next((each for each in _WORST_FIRST if each in statuses), HealthStatus.READY),
        reasons=[
            HealthReason(code=code, since=since[code, text], text=f"{text} (worker {', '.join(map(str, numbers))})")
            for (code, text), numbers in workers.items()
        ],
    )


async def able_to_enforce(watch: AgentHealth, patience_s: float) -> None:
    """Wait until the agent can enforce, for `patience_s` at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while worst_of(watch.findings()) is HealthStatus.NOT_READY:  # noqa: ASYNC110 - several parts decide it
                await asyncio.sleep(REFRESH_INTERVAL_S)
