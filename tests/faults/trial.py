"""Make one fault after the other, wait until the services report it, and record what they report."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from leasehold.local_stack.processes import wait_until
from tests.faults.scene import (
    AGENT,
    PATIENCE_S,
    Decision,
    Readiness,
    Scene,
    wait_for_recovery,
)
from tests.faults.table import Fault

SERVICES = {"agent": AGENT, "coordinator": "coordinator"}


@dataclass(frozen=True)
class Record:
    """The health and the decision that were reported while a fault lasted."""

    fault: Fault
    agent: Readiness
    coordinator: Readiness
    decision: Decision
    slowest_ms: float  # check since the fault was made
    lines: list[tuple[str, dict[str, Any]]]  # service and line of each event that the fault's table names
    other_events: list[str]  # warnings and errors that it does not name

    def mismatches(self) -> list[str]:
        """Describe what differs from the fault's table."""
        fault, decision = self.fault, self.decision
        found = {
            "agent": (_says(self.agent, fault.agent), str(self.agent), fault.agent),
            "coordinator": (_says(self.coordinator, fault.coordinator), str(self.coordinator), fault.coordinator),
            "check": (_matches(decision, fault.check), decision, fault.check),
            "log": (len(self.lines) == len(fault.log), [line["event"] for _, line in self.lines], fault.log),
        }
        return [
            f"{fault.name}, {what}: {was}, not {wanted}" for what, (is_so, was, wanted) in found.items() if not is_so
        ]


def run(scene: Scene, faults: Iterable[Fault]) -> Iterator[Record]:
    """Yield the report of each fault. Each fault begins and ends with a region that is ready."""
    for fault in faults:
        scene.tenant = f"tenant-{fault.name}"
        if fault.is_fresh:
            scene.empty_store()
            scene.restart(scene.agent)
        assert wait_until(scene.is_well, PATIENCE_S), (scene.agents_readiness(), scene.coordinators_readiness())
        scene.subscribe(fault.plan)
        assert wait_until(lambda: scene.check().status == 200, PATIENCE_S), scene.check()
        if fault.plan == "large":
            scene.use_much()
        scene.mark_logs()
        fault.make(scene)
        record = observe(scene, fault)
        fault.heal(scene)
        wait_for_recovery(scene)
        yield record


def observe(scene: Scene, fault: Fault) -> Record:
    """Wait until everything in the fault's table is reported; after PATIENCE_S return what is reported instead."""
    slowest_ms = 0.0
    record = None

    def is_said() -> bool:
        nonlocal slowest_ms, record
        decision = fault.ask(scene)
        slowest_ms = max(slowest_ms, decision.took_ms)
        agent = scene.agents_readiness()
        lines = _lines(scene, fault)
        is_complete = _says(agent, fault.agent) and _matches(decision, fault.check) and len(lines) == len(fault.log)
        coordinator = scene.coordinators_readiness() if is_complete or record is None else record.coordinator
        record = Record(fault, agent, coordinator, decision, slowest_ms, lines, _other_events(scene, fault))
        return not record.mismatches()

    wait_until(is_said, PATIENCE_S)
    assert record is not None
    return record


def _says(readiness: Readiness, wanted: tuple[int | None, str]) -> bool:
    status, code = wanted
    return readiness.status == status and (code in readiness.codes if code else not readiness.codes)


def _matches(decision: Decision, wanted: tuple[int, str, str | None]) -> bool:
    return (decision.status, decision.problem, decision.reason) == wanted


def _lines(scene: Scene, fault: Fault) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for service, event in fault.log:
        lines = (line for line in scene.log(SERVICES[service]) if line["event"].startswith(event))
        found += [(service, line) for line in lines][:1]
    return found


def _other_events(scene: Scene, fault: Fault) -> list[str]:
    named = tuple(event for _, event in fault.log)
    events = {
        f"{service}: {line['event']}"
        for service, name in SERVICES.items()
        for line in scene.log(name)
        if line.get("level") in ("warning", "error", "critical") and not line["event"].startswith(named)
    }
    return sorted(events)


# --- as a table -------------------------------------------------------------------------------------------------------

HEAD = ["fault", "agent's `/readyz`", "coordinator's `/readyz`", "a check of an allowance", "took (slowest)", "log"]


def table(records: Iterable[Record]) -> str:
    rows = [HEAD, ["---"] * len(HEAD), *map(_row, records)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(record: Record) -> list[str]:
    decision = record.decision
    took = f"{decision.took_ms:,.0f} ms ({record.slowest_ms:,.0f} ms)"
    log = "; ".join(_shown_line(service, line) for service, line in record.lines) or "nothing"
    return [record.fault.title, str(record.agent), str(record.coordinator), _shown(decision), took, log]


def _shown(decision: Decision) -> str:
    if decision.status in (None, 200):
        return str(decision.status or "no answer")
    if decision.reason is None:
        return f"{decision.status} `{decision.problem}`"
    return f"{decision.status} `{decision.problem}`, reason `{decision.reason}`, retry {_shown_retry(decision)}"


def _shown_retry(decision: Decision) -> str:
    if decision.retry_after_ms is None:
        return "never"
    return "at the period's end" if decision.is_until_the_period_ends else f"in {decision.retry_after_ms:,} ms"


def _shown_line(service: str, line: dict[str, Any]) -> str:
    reason = line.get("code") or ", ".join(line.get("reasons") or ()) if "reason" not in line else line["reason"]
    return f"{service}: `{line['event']}`" + (f" ({_shortened(str(reason))})" if reason else "")


def _shortened(text: str, most: int = 90) -> str:
    text = re.sub(r"/\S*/journal\S*", "JOURNAL_DIR", re.sub(r"\d+(\.\d+){3}:\d+", "HOST:PORT", text))
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) <= most else f"{text[: most - 1]}…"
