"""A coordinator whose clock is `CLOCK_AHEAD_S` seconds ahead: `python -m tests.faults.skewed_coordinator`."""

import os
from datetime import datetime, timedelta
from unittest.mock import patch

from coordinator import main
from protocol.clock import SystemClock


class AheadClock(SystemClock):
    """Run ahead of the system clock."""

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=float(os.environ["CLOCK_AHEAD_S"]))


if __name__ == "__main__":
    with patch.object(main, "SystemClock", AheadClock):
        main.run()
