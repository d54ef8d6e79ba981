"""What a run can reach, and which of it was not: answers that have a name, and cells of the transition table."""

from collections import Counter

from protocol.lease import LeaseEvent, LeaseState
from protocol.outcomes import DenialReason, EpochRefusal, ExchangeOutcome, GrantRefusal

OUTCOMES = [
    f"{kind.__name__}.{each.name}"
    for kind in (ExchangeOutcome, GrantRefusal, EpochRefusal, DenialReason)
    for each in kind
]
CELLS = [f"{state.name} / {event.name}" for state in LeaseState for event in LeaseEvent]


def unreached(reached: Counter[str]) -> dict[str, list[str]]:
    """Refusals that nobody met, and cells of the transition table that nothing asked for."""
    return {
        "outcomes": [name for name in OUTCOMES if not reached[name]],
        "cells": [name for name in CELLS if not reached[name]],
    }
