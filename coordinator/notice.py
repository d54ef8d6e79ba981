"""A signal and whom it is for; without a region, for all."""

from msgspec import Struct

from protocol.messages import Signal


class Notice(Struct, frozen=True):
    signal: Signal
    region: str | None = None
