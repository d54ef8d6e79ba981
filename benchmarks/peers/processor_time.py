"""The processor time of a process, as Linux counts it."""

import os
import sys
from pathlib import Path


def used_us(pid: int | None) -> float:
    """Return the microseconds that all threads of a process have used, or 0 if there is no process.

    Where this is not Linux, every process has used 0.
    """
    if pid is None or sys.platform != "linux":
        return 0
    return parse_ticks(Path(f"/proc/{pid}/stat").read_text()) * 1e6 / os.sysconf("SC_CLK_TCK")


def parse_ticks(stat: str) -> int:
    """Return user and system time. The second field, a name in parentheses, may contain anything."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
