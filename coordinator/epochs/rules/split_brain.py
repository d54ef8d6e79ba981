"""Two stores answer under one region's name, each lives on, and each new epoch of the one fences the other's.

Neither is at fault by itself, and a single incarnation may well begin again and again, or be left and come back a few
times. The sign is that two lives have both opened many epochs in a short time: from then on neither of them opens
another. Whichever has the region's epoch keeps it, until the openings are long enough ago or a store has begun another
incarnation.
"""

from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

LATELY = timedelta(minutes=5)
MOST_OPENINGS = 4  # of one incarnation, lately, while another has as many


def contenders(openings: Iterable[str]) -> set[str]:
    """Of the fingerprints under which a region's epochs were opened lately, those that may not open another."""
    restless = {incarnation for incarnation, times in Counter(openings).items() if times >= MOST_OPENINGS}
    return restless if len(restless) > 1 else set()
