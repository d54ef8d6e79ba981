"""What a run can reach and did not: named outcomes and cells of the transition table.

Cells that cannot be reached are listed here with the reason. A run that reaches one shows that the reason is wrong. The
same holds for outcomes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from protocol.lease import LeaseEvent, LeaseState
from protocol.outcomes import DenialReason, EpochRefusal, ExchangeOutcome, GrantRefusal

_A, _E, _F, _L = LeaseState.ACTIVE, LeaseState.EXPIRED, LeaseState.FENCED, LeaseState.LOST
_Q, _R, _C = LeaseState.QUARANTINED, LeaseState.RETIRED, LeaseState.CLOSED

_NEVER_ASKED: tuple[tuple[LeaseEvent, tuple[LeaseState, ...], str], ...] = (
    (LeaseEvent.GRANT, (_F, _L, _R), "demands of an epoch that is over are refused before its leases are looked at"),
    (LeaseEvent.GRANT, (_C,), "wanted is what runs or comes next, and only what is over is closed"),
    (LeaseEvent.REPORT, (_R,), "what a retired epoch says is kept for people, and never settled"),
    (LeaseEvent.REPORT, (_C,), "what is late for a closed period is booked in its correction"),
    (LeaseEvent.EXPIRE, (_C,), "nothing is outstanding of what is closed"),
    (LeaseEvent.RENEW, (_Q, _C), "only a lease that was just settled or resolved is renewed"),
    (LeaseEvent.FENCE, (_F, _L, _R), "an epoch is fenced once, while it is current"),
    (LeaseEvent.LOSE, (_R,), "a retired epoch can lose nothing more"),
    (LeaseEvent.PROVE, (_A, _E, _F, _R), "proved is an epoch that is believed lost: it has no other leases"),
    (LeaseEvent.QUARANTINE, (_Q, _R, _C), "only what may be reported on is found to disagree"),
    (LeaseEvent.RESOLVE, (_A, _E, _F, _L, _R, _C), "a resolution of a quarantine is refused for what is in none"),
    (LeaseEvent.RETIRE, (_R,), "an epoch is retired once"),
    (LeaseEvent.CLOSE, (_Q,), "a close waits until people have looked at it"),
    (LeaseEvent.CLOSE, (_C,), "a period is closed once"),
)


def _cell(state: LeaseState, event: LeaseEvent) -> str:
    return f"{state.name} / {event.name}"


IMPOSSIBLE = {_cell(state, event): reason for event, states, reason in _NEVER_ASKED for state in states}
ELSEWHERE = {
    "EpochRefusal.TWO_STORES": "a virtual region has one store at a time; test_ledger_model.py gives it two",
    "ExchangeOutcome.REFUSED": "agents here send nothing malformed; coordinator/exchange/test_malformed.py does",
    "GrantRefusal.INVALID": "likewise",
    "GrantRefusal.TOTAL_TOO_LARGE": "nobody here needs 2^53 units; coordinator/exchange/test_grants.py does",
    "DenialReason.SLOTS_TAKEN": "no quota here is a concurrency; those of tests/lua/test_slots.py are",
    "DenialReason.HOLD_NEEDED": "likewise, and in shadow; tests/lua/test_shadows.py",
}
OUTCOMES = [
    name
    for kind in (ExchangeOutcome, GrantRefusal, EpochRefusal, DenialReason)
    for each in kind
    if (name := f"{kind.__name__}.{each.name}") not in ELSEWHERE
]
CELLS = [cell for state in LeaseState for event in LeaseEvent if (cell := _cell(state, event)) not in IMPOSSIBLE]


def unreached(reached: Counter[str]) -> dict[str, list[str]]:
    """Return refusals and cells of the transition table that no run has reached."""
    return {
        "outcomes": [name for name in OUTCOMES if not reached[name]],
        "cells": [name for name in CELLS if not reached[name]],
    }


def wrongly_impossible(reached: Iterable[str]) -> Iterator[str]:
    yield from (f"{cell}: {IMPOSSIBLE[cell]}" for cell in reached if cell in IMPOSSIBLE)
