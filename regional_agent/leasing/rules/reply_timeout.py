"""How long an exchange waits for its reply, and when it is sent again.

The next exchange would carry the same bytes, and sending them twice does no harm. So a lost reply is replaced soon:
requests are waiting for the grant.
"""

from functools import partial

from protocol.backoff import Backoff

FIRST_PAUSE_MS = 400
LONGEST_PAUSE_MS = 5_000

# Counted from the sending of the exchange that failed.
exchange_backoff = partial(Backoff, FIRST_PAUSE_MS, LONGEST_PAUSE_MS)


def reply_timeout_ms(backoff: Backoff, round_trip_ms: int) -> float:
    """Return how long to wait: as long as the next pause, or twice the latest round trip, up to the longest pause."""
    return min(LONGEST_PAUSE_MS, max(backoff.next_pause, 2 * round_trip_ms))
