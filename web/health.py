"""The response of `/readyz` in both services."""

from datetime import datetime
from enum import StrEnum
from typing import Literal

from msgspec import Struct


class HealthStatus(StrEnum):
    READY = "ready"
    DEGRADED = "degraded"
    NOT_READY = "not_ready"


class HealthReason(Struct, frozen=True, kw_only=True):
    """A reason why the process is not ready, or degraded, and the time since when."""

    code: str
    since: datetime
    text: str


class Liveness(Struct, frozen=True):
    """The process is alive, whatever it can do."""

    status: Literal["ok"] = "ok"


class Health(Struct, frozen=True, kw_only=True):
    """Ready, degraded (it serves requests, and a reason says what is wrong), or not ready (send requests elsewhere)."""

    status: HealthStatus
    reasons: list[HealthReason]
