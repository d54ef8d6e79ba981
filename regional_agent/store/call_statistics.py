"""How long calls of the store take, and how they fail: for the decision time-out, and for the metrics.

All connections of an agent share one record. It is plain numbers, which become samples when metrics are scraped.
"""

from collections import Counter

from regional_agent.store.rules.decision_timeout import ENOUGH, DecisionTimeout
from web.metrics import Durations

BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
NOT_CONNECTED, CONNECTION_LOST, TIMEOUT, OTHER = "not_connected", "connection_lost", "timeout", "other"
# Codes of a store's errors that are counted by themselves. A label must not be what a server chooses to send.
CODES_OF_STATE = ("BUSY", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY")
CODES = {
    *CODES_OF_STATE,
    "ASK",
    "CLUSTERDOWN",
    "ERR",
    "MOVED",
    "NOAUTH",
    "NOPERM",
    "TRYAGAIN",
    "WRONGPASS",
    "WRONGTYPE",
}


class StoreCallStatistics:
    def __init__(self, decision_timeout: DecisionTimeout) -> None:
        self.decision_timeout = decision_timeout
        self.decisions, self.others = Durations(BUCKETS_S), Durations(BUCKETS_S)
        self.failures: Counter[str] = Counter()
        self._unread: list[float] = []  # round trips of decisions

    def note_reply(self, seconds: float, *, is_decision: bool) -> None:
        """Note a round trip, also of a reply that came too late for its caller. Decisions are read by eights."""
        if not is_decision:
            self.others.observe(seconds)
            return
        self._unread.append(seconds)
        if len(self._unread) >= ENOUGH:
            self.read_decisions()

    def read_decisions(self) -> None:
        """Take the latest round trips of decisions into account."""
        for seconds in self._unread:
            self.decisions.observe(seconds)
        self.decision_timeout.note(self._unread)
        self._unread.clear()

    def note_error(self, text: str) -> None:
        """Note an error that the store answered with."""
        code = text.partition(" ")[0]
        self.failures[code.lower() if code in CODES else OTHER] += 1
