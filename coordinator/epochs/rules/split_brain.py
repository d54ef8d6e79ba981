"""Detect two stores that run under one region's name, so that each new epoch of one fences the other's.

Neither is at fault by itself, and a single incarnation may well open epochs again and again, or be left and come back
a few times. The sign is that two incarnations have both opened many epochs in a short time: from then on neither opens
another. The store that has the region's epoch keeps it, until the openings are long enough ago or a store begins
another incarnation.
"""

from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

WINDOW = timedelta(minutes=5)
MOST_OPENINGS = 4  # of one incarnation in the window, while another has as many


def conflicting_stores(openings: Iterable[str]) -> set[str]:
    """Return the fingerprints that may not open another epoch. `openings`: of all epochs opened in the window."""
    restless = {fingerprint for fingerprint, times in Counter(openings).items() if times >= MOST_OPENINGS}
    return restless if len(restless) > 1 else set()
