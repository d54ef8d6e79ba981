"""A signal and the region it is for, or all regions."""

from msgspec import Struct

from protocol.messages import Signal


class Notice(Struct, frozen=True):
    signal: Signal
    region: str | None = None
