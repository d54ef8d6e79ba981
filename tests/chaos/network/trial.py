"""Make a fault under load, heal it, wait until both regions admit again, and compare the ledger with the journal."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from leasehold.local_stack.calls import call
from leasehold.local_stack.processes import wait_until
from tests.chaos.balance import Line, settled_balance
from tests.chaos.load import Journal, Load, reason_of
from tests.chaos.network.alerts import Alerts
from tests.chaos.network.faults import Fault
from tests.chaos.network.stack import LIMIT, OPEN_ROUTE, OTHER, TARGET, DividedStack
from tests.chaos.network.wan import CORE
from tests.chaos.pieces import REGIONS

PATIENCE_S = 120
STEADY_ANSWERS = 30  # admissions in a row, after which a region has recovered
READ_WITHIN_S = 2.0
LOOK_EVERY_S = 0.2
PAUSE_S = 0.05
ROUTES = ("/v1/exports", OPEN_ROUTE)


@dataclass
class Answers:
    """The answers that the services of one region got."""

    statuses: Counter[int] = field(default_factory=Counter)  # 0 is no answer
    reasons: Counter[str] = field(default_factory=Counter)
    admitted_in_a_row: int = 0
    last_refused_s: float = 0.0

    def note(self, status: int, body: bytes) -> None:
        self.statuses[status] += 1
        self.admitted_in_a_row = self.admitted_in_a_row + 1 if status == 200 else 0
        if status != 200:
            self.last_refused_s = time.monotonic()
            self.reasons[reason_of(status, body)] += 1

    @property
    def refused(self) -> int:
        return self.statuses.total() - self.statuses[200]


@dataclass
class Record:
    """The observations of one fault."""

    fault: Fault
    answers: dict[str, Answers]
    agents: Counter[str]  # codes of `/readyz`
    coordinators: Counter[str]
    lasted_s: float
    recovered_s: float | None  # from the end of the fault to the last refusal; None if that was not awaited in time
    line: Line
    alerts: frozenset[str]  # those whose condition began to hold during the fault, and that fired

    def faults(self) -> list[str]:
        """Return what contradicts the promises, whatever the fault was."""
        found = self.line.faults()
        if self.recovered_s is None:
            found.append(f"{self.fault.name}: not recovered within {PATIENCE_S} s")
        if not _shows(self.fault, self.agents + self.coordinators):
            found.append(f"{self.fault.name}: no service reported {' or '.join(self.fault.shows)}")
        if self.fault.alert and self.fault.alert not in self.alerts:
            found.append(f"{self.fault.name}: {self.fault.alert} did not fire, but {sorted(self.alerts)}")
        if not self.fault.is_of_all_regions and self.answers[OTHER].refused:
            found.append(f"{self.fault.name}: {OTHER} noticed it: {dict(self.answers[OTHER].reasons)}")
        return found


def try_out(stack: DividedStack, alerts: Alerts, fault: Fault, lasts_s: float, seed: int) -> Record:
    """Return what was observed. The stack is whole before and after."""
    tenant = f"tenant-{fault.name}"
    answers = {region: Answers() for region in REGIONS}
    seen = Seen(stack, alerts)
    with _loads(stack, tenant, answers, seed) as loads:
        assert wait_until(lambda: _are_steady(answers), PATIENCE_S), answers
        assert wait_until(lambda: seen.are_over(fault.alert), PATIENCE_S), alerts.firing()
        for each in answers.values():
            each.statuses.clear()
            each.reasons.clear()
        began_s = seen.begin()
        fault.make(stack)
        wait_until(lambda: seen.look() >= began_s + lasts_s and seen.shows(fault), PATIENCE_S, LOOK_EVERY_S)
        lasted_s = time.monotonic() - began_s
        fault.heal(stack)
        healed_s = time.monotonic()
        stack.wait()
        for each in answers.values():
            each.admitted_in_a_row = 0
        has_recovered = wait_until(lambda: _are_steady(answers), PATIENCE_S)
    seen.look_at_alerts()
    last_s = max(each.last_refused_s for each in answers.values())
    [line] = settled_balance(stack, _added(load.journal for load in loads), {tenant: LIMIT})
    recovered_s = max(0.0, last_s - healed_s) if has_recovered else None
    fired = frozenset(seen.fired)
    return Record(fault, answers, seen.agents, seen.coordinators, lasted_s, recovered_s, line, fired)


class Seen:
    """The health and alerts that the services of the target and of the core showed during a fault."""

    def __init__(self, stack: DividedStack, alerts: Alerts) -> None:
        self._stack, self._alerts = stack, alerts
        self._began_at = datetime.now(UTC)
        self.agents: Counter[str] = Counter()  # codes of `/readyz`
        self.coordinators: Counter[str] = Counter()
        self.fired: set[str] = set()

    def begin(self) -> float:
        self._began_at = datetime.now(UTC)
        return time.monotonic()

    def look(self) -> float:
        """Note what `/readyz` of the target's agents and of the coordinator says, and return the time."""
        with self._stack.wan.inside(TARGET):
            for url in self._stack.agents_of[TARGET]:
                self.agents.update(_codes(url))
        with self._stack.wan.inside(CORE):
            self.coordinators.update(_codes(self._stack.coordinator))
        self.look_at_alerts()
        return time.monotonic()

    def look_at_alerts(self) -> None:
        self.fired |= {each.name for each in self._alerts.firing() if each.since >= self._began_at}

    def are_over(self, alert: str) -> bool:
        """Return whether an alert of an earlier fault has ended."""
        return alert not in {each.name for each in self._alerts.firing()}

    def shows(self, fault: Fault) -> bool:
        return _shows(fault, self.agents + self.coordinators) and (not fault.alert or fault.alert in self.fired)


def _are_steady(answers: dict[str, Answers]) -> bool:
    return all(each.admitted_in_a_row >= STEADY_ANSWERS for each in answers.values())


@contextmanager
def _loads(stack: DividedStack, tenant: str, answers: dict[str, Answers], seed: int) -> Iterator[Sequence[Load]]:
    """Run the callers of each region at its place."""
    loads = {
        region: Load(
            {region: stack.agents_of[region]}, seed,
            tenants=(tenant,), routes=ROUTES, pause_s=PAUSE_S, note=answers[region].note,
        )
        for region in REGIONS
    }  # fmt: skip

    def run(region: str) -> None:
        with stack.wan.inside(region):
            asyncio.run(loads[region].run())

    threads = [threading.Thread(target=run, args=(region,), name=f"load of {region}") for region in REGIONS]
    for thread in threads:
        thread.start()
    try:
        yield list(loads.values())
    finally:
        for load in loads.values():
            load.stop()
        for thread in threads:
            thread.join()


def _shows(fault: Fault, codes: Counter[str]) -> bool:
    return not fault.shows or any(reason in code for code in codes for reason in fault.shows)


def _codes(url: str) -> list[str]:
    try:
        found = call("GET", f"{url}/readyz", timeout_s=READ_WITHIN_S)
    except OSError:
        return ["no answer"]
    return [f"{found.status} {each['code']}" for each in found.body["reasons"]] or [str(found.status)]


def _added(journals: Iterator[Journal]) -> Journal:
    whole = Journal()
    for each in journals:
        whole.admitted += each.admitted
        whole.unsure += each.unsure
        whole.answers += each.answers
        whole.cut_off += each.cut_off
    return whole
