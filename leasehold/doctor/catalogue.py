"""All checks, in the order in which the documentation explains them."""

from typing import Any

from coordinator.diagnosis.rules import (
    COORDINATOR_CHECKS,
    DISK_CHECKS,
    LEDGER_CHECKS,
    SCHEMA_CHECKS,
    SERVER_CHECKS,
)
from leasehold.doctor.envoy_rules import ENVOY_CHECKS
from leasehold.doctor.rules import OUTSIDE_CHECKS
from protocol.diagnosis.checks import Check
from regional_agent.diagnosis.rules import AGENT_CHECKS, STORE_CHECKS

CATALOGUE: dict[str, tuple[Check[Any], ...]] = {
    "From the doctor's machine": OUTSIDE_CHECKS,
    "Coordinators": COORDINATOR_CHECKS,
    "Database": (*SERVER_CHECKS, *SCHEMA_CHECKS, *DISK_CHECKS),
    "Ledger": LEDGER_CHECKS,
    "Agents": AGENT_CHECKS,
    "Stores": STORE_CHECKS,
    "Configurations of Envoy": ENVOY_CHECKS,
}


def all_checks() -> list[Check[Any]]:
    return [check for checks in CATALOGUE.values() for check in checks]
