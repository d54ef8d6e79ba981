"""The balance sheet compares what the services were answered with the ledger."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leasehold.local_stack.processes import wait_until
from tests.chaos.load import Journal
from tests.chaos.pieces import TENANTS, Stack

QUIET_S = 30
LOOK_EVERY_S = 0.2
EQUAL_LOOKS = 10


@dataclass(frozen=True)
class Line:
    tenant: str
    limit: int
    admitted: int
    unsure: int
    consumed: int
    unaccounted: int  # leased and not accounted for: outstanding, suspense, estimated, written off
    suspense: int = 0  # part of it

    def faults(self) -> list[str]:
        """Return the faults of the tenant: units sold twice, lost, or booked twice."""
        found = []
        if self.admitted > self.limit:
            found.append(f"{self.tenant}: {self.admitted} admitted of {self.limit}")
        if self.consumed + self.unaccounted > self.limit:
            found.append(f"{self.tenant}: {self.consumed} + {self.unaccounted} booked of {self.limit}")
        if self.consumed + self.unaccounted < self.admitted:
            found.append(f"{self.tenant}: {self.admitted} admitted, only {self.consumed} + {self.unaccounted} booked")
        if self.consumed > self.admitted + self.unsure:
            found.append(f"{self.tenant}: {self.consumed} consumed, only {self.admitted} + {self.unsure} admitted")
        return found


def settled_balance(stack: Stack, journal: Journal, limits: Mapping[str, int] = TENANTS) -> list[Line]:
    """Return the balance of tenants with these limits once it stays the same, when all messages have arrived."""
    seen: list[list[Line]] = []

    def stands_still() -> bool:
        seen.append(_balance(stack, journal, limits))
        return len(seen) > EQUAL_LOOKS and all(each == seen[-1] for each in seen[-EQUAL_LOOKS:])

    wait_until(stands_still, QUIET_S, LOOK_EVERY_S)
    return seen[-1]


def _balance(stack: Stack, journal: Journal, limits: Mapping[str, int]) -> list[Line]:
    quotas = _quotas(stack)
    return [
        Line(
            tenant,
            limit,
            journal.admitted[tenant],
            journal.unsure[tenant],
            quotas[tenant]["consumed"],
            quotas[tenant]["outstanding"] + quotas[tenant]["suspense"] + quotas[tenant]["written_off"],
            quotas[tenant]["suspense"],
        )
        for tenant, limit in limits.items()
    ]


def _quotas(stack: Stack) -> dict[str, dict[str, Any]]:
    periods: Any = stack.read("/v1/periods")
    [period] = periods["data"]
    reconciliation: Any = stack.read(f"/v1/periods/{period['id']}/reconciliation")
    assert (reconciliation["status"], reconciliation["drift"]) == ("balanced", 0), reconciliation
    return {quota["tenant"]: quota for quota in reconciliation["quotas"]}


def sheet(lines: list[Line], journal: Journal, kills: list[str]) -> str:
    """Return the printed sheet: every kill, and then the sums."""
    rows = [f"{'tenant':8}{'limit':>12}{'admitted':>12}{'unsure':>9}{'consumed':>12}{'unaccounted':>13}"]
    rows += [
        f"{each.tenant:8}{each.limit:12,}{each.admitted:12,}{each.unsure:9,}{each.consumed:12,}{each.unaccounted:13,}"
        for each in lines
    ]
    answers = ", ".join(f"{count:,} of {status}" for status, count in sorted(journal.answers.items()))
    return "\n".join([*kills, "", *rows, "", f"answers: {answers}; cut off: {journal.cut_off:,}"])
