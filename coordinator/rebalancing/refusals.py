"""Why a rebalance is not planned, or not begun."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias
from uuid import UUID

from coordinator.limits.rules.validation import DocumentFault
from coordinator.rebalancing.rules.plan import Plan
from coordinator.rebalancing.schemas import Rebalance


class InvalidRebalance(NamedTuple):
    faults: Sequence[DocumentFault]


class NewerRebalances(NamedTuple):
    """Other rebalances have begun since the version that the request expects."""

    since: Sequence[Rebalance]


class RebalanceRunning(NamedTuple):
    """Another rebalance moves units of the same pool."""

    other: UUID


class NothingToMove(NamedTuple):
    plan: Plan


class UnknownPool(NamedTuple):
    quota: str


Refusal: TypeAlias = InvalidRebalance | NewerRebalances | RebalanceRunning | NothingToMove | UnknownPool


class RebalanceRefused(Exception):
    """Ends the planning, and so the transaction, with a refusal."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal


def invalid(field: str, rule: str, reason: str) -> RebalanceRefused:
    return RebalanceRefused(InvalidRebalance([DocumentFault(field, rule, reason)]))
