"""When the same is said again, for nothing lost is said to be lost: there is only no reply."""

from dataclasses import dataclass

FIRST_PAUSE_MS = 400
LONGEST_PAUSE_MS = 5_000


@dataclass(slots=True)
class Persistence:
    """Again 0.4 s after it was said, and then ever later, up to 5 s: who fails at once is not asked at once.

    So long a reply is waited for, too, or twice as long as one took lately: requests wait meanwhile, and saying the
    same once more does no harm.
    """

    pause_ms: int = 0
    again_at_ms: int = 0

    def reply_within_ms(self, round_trip_ms: int) -> int:
        return min(LONGEST_PAUSE_MS, max(FIRST_PAUSE_MS, 2 * round_trip_ms, 2 * self.pause_ms))

    def failed(self, said_at_ms: int) -> None:
        self.pause_ms = min(LONGEST_PAUSE_MS, max(FIRST_PAUSE_MS, 2 * self.pause_ms))
        self.again_at_ms = said_at_ms + self.pause_ms

    def succeeded(self) -> None:
        self.pause_ms = self.again_at_ms = 0
