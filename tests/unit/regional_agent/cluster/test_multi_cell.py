"""Quotas are grouped by the cell of a Cluster, and shadow policies in other cells are left out."""

from typing import Any

import msgspec

from protocol.limits.document import LimitsDocument, PolicyBundle
from regional_agent.admission.plan import CheckPlan
from regional_agent.admission.policies import Policies
from regional_agent.cluster.multi_cell import drop_foreign_shadows
from regional_agent.cluster.rules.cells import cell_of
from regional_agent.store.types import Operation, StoreRequest


def quotas() -> tuple[str, str, str]:
    """Return two quotas whose keys lie in one cell, and one whose key lies in another."""
    names = [f"q{number}" for number in range(200)]
    first, *others = names
    near = next(name for name in others if cell_of(f"{name}:user=a") == cell_of(f"{first}:user=a"))
    far = next(name for name in others if cell_of(f"{name}:user=a") != cell_of(f"{first}:user=a"))
    return first, near, far


def asked_of(*policies: tuple[str, bool], operation: Operation | None = None) -> CheckPlan:
    """Return the charges of a request that matches policies on these quotas, each in shadow or not."""
    document: dict[str, Any] = {
        "quotas": [{"name": name, "kind": "rate", "limit": "5/second"} for name, _ in policies],
        "policies": [{"name": name, "quota": name, "by": ["user"], "shadow": shadow} for name, shadow in policies],
    }
    bundle = PolicyBundle(
        version=1, document=msgspec.convert(document, LimitsDocument), subscriptions={}, weight=1, total_weight=1
    )
    subject = {"user": "a"}
    policy_charges = Policies(bundle).charges_for(subject, None)
    charges = tuple(each.charge for each in policy_charges)
    return CheckPlan(subject, policy_charges, StoreRequest("enforce", charges, operation))


def kept(asked: CheckPlan) -> list[str]:
    """Return the quotas that are checked."""
    asked = drop_foreign_shadows(asked)
    assert len(asked.request.charges) == len(asked.policy_charges)
    return [charge.quota.partition(":")[0] for charge in asked.request.charges]


def test_a_shadow_in_another_cell_is_left_out() -> None:
    first, near, far = quotas()
    assert kept(asked_of((first, False), (far, True), (near, True))) == [first, near]
    assert kept(asked_of((far, True), (first, True), (near, True))) == [far]
    assert kept(asked_of((first, False), (near, False))) == [first, near]


def test_a_check_of_several_cells_leaves_out_all_shadows() -> None:
    first, near, far = quotas()
    assert kept(asked_of((near, True), (first, False), (far, False))) == [first, far]
