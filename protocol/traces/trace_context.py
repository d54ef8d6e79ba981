"""The W3C trace context: which trace a request belongs to, as the header `traceparent` carries it.

The module loads nothing else, for it is also read where traces are not installed.
"""

import re
from typing import NamedTuple

HEADER = "traceparent"
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 0x01
SAMPLED_DIGITS = b"13579bdf"  # the last one of a `traceparent` that is sampled


class TraceContext(NamedTuple):
    """A place in a trace: that of the span that caused a request."""

    trace_id: int
    span_id: int
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"


def parse_traceparent(text: str | None) -> TraceContext | None:
    """Return the context that a header carries. A malformed one counts as missing, as the standard says."""
    found = _TRACEPARENT.fullmatch(text) if text else None
    if found is None:
        return None
    return TraceContext(int(found[1], 16), int(found[2], 16), bool(int(found[3], 16) & _SAMPLED))
