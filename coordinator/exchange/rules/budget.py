"""The budgets of a region, as decisions see them; `coordinator/exchange/budgets.py` counts."""

from enum import StrEnum
from typing import Protocol


class Budget(StrEnum):
    NEW_KEYS = "new_keys"  # quota keys without a pool in any period
    NEW_PERIODS = "new_periods"  # that a report without a grant names: each is a table
    EPOCHS = "epochs"
    JOURNAL_EPOCHS = "journal_epochs"
    QUARANTINE_ROWS = "quarantine_rows"
    QUARANTINE_BYTES = "quarantine_bytes"
    DECISIONS = "decisions"  # rows of the decision log


class Take(Protocol):
    def __call__(self, region: str, budget: Budget, amount: int) -> int:
        """Take up to an amount from a region's budget and return how much of it was there."""
