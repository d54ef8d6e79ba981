"""Facts that only an outside view has: who answers, with which certificate and release."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import NamedTuple


class TlsFacts(NamedTuple):
    """The handshake with a host."""

    is_encrypted: bool
    is_local: bool
    fault: str | None  # why the certificate was not accepted, or there was no handshake
    expires_at: datetime | None
    now: datetime


class HealthFacts(NamedTuple):
    """The answer to /readyz."""

    fault: str | None  # why there was none
    status: str  # ready, degraded, not_ready
    reasons: tuple[str, ...]
    took_ms: float


class AccessFacts(NamedTuple):
    """The answer of a service to a token."""

    variable: str  # that the token is read from
    status: int | None  # of the answer; None: there was none
    detail: str
    is_set: bool


class ReleaseFacts(NamedTuple):
    by_subject: Mapping[str, str]


class ClockFacts(NamedTuple):
    ahead: timedelta | None  # of this machine's clock, beside the coordinator's; None: nothing to compare with
