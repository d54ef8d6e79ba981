"""Which lanes send no batch for now, and why.

A lane *stops* when the coordinator refused its batch: the batch stays in the store until people resolve it. A lane
*pauses* when something else stood in the way for a moment. Both are what this agent knows. The truth is in the store,
which all agents of the region share: once another agent's batch was accepted, the lane's number in the store changes.
"""

from dataclasses import dataclass
from functools import partial

from protocol.backoff import Backoff
from protocol.outcomes import ExchangeOutcome

FIRST_PAUSE_MS = 30_000
LONGEST_PAUSE_MS = 900_000  # a batch that is refused as it is: only a change of the coordinator helps

stop_backoff = partial(Backoff, FIRST_PAUSE_MS, LONGEST_PAUSE_MS)

LaneId = tuple[int, int]  # epoch and lane


@dataclass(slots=True)
class StoppedLane:
    seq: int
    outcome: ExchangeOutcome
    reason: str
    offer_at_ms: float
    backoff_ms: Backoff
    is_resting: bool = True


class Lanes:
    def __init__(self) -> None:
        self.stopped: dict[LaneId, StoppedLane] = {}
        self.unacknowledged: set[int] = set()  # lanes whose batch may still wait for its receipt
        self._paused_until_ms: dict[LaneId, int] = {}

    def stop(self, lane: LaneId, seq: int, outcome: ExchangeOutcome, reason: str, now_ms: int) -> bool:
        """Stop sending a lane's batch. Return False if the same stop was known."""
        before = self.stopped.get(lane)
        is_known = before is not None and (before.seq, before.outcome) == (seq, outcome)
        backoff_ms = before.backoff_ms if before is not None and is_known else stop_backoff()
        pause_ms = backoff_ms.failed(now_ms)
        offer_at_ms = now_ms + pause_ms if outcome is ExchangeOutcome.REFUSED else now_ms
        self.stopped[lane] = StoppedLane(seq, outcome, reason, offer_at_ms, backoff_ms)
        return not is_known

    def pause(self, lane: LaneId, now_ms: int, for_ms: int) -> None:
        self._paused_until_ms[lane] = now_ms + for_ms

    def resume(self, lane: LaneId) -> bool:
        """Forget why the lane sent nothing. Return True if it had stopped."""
        self._paused_until_ms.pop(lane, None)
        return self.stopped.pop(lane, None) is not None

    def offer_again(self, now_ms: int) -> None:
        """Let stopped lanes send their batch again: people may have resolved it. A refused batch waits longer."""
        for stop in self.stopped.values():
            stop.is_resting = now_ms < stop.offer_at_ms

    def may_send(self, lane: LaneId, now_ms: int) -> bool:
        stop = self.stopped.get(lane)
        return not (stop is not None and stop.is_resting) and now_ms >= self._paused_until_ms.get(lane, 0)

    def paused_for_ms(self, lane: LaneId, now_ms: int) -> int:
        return max(0, self._paused_until_ms.get(lane, 0) - now_ms)

    def has_stopped(self, epoch: int) -> bool:
        return any(each == epoch for each, _ in self.stopped)
