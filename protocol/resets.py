"""Resets: what a rate has counted of some keys is forgotten in every region, as people order it."""

from typing import Annotated

from msgspec import Meta, Struct

from protocol.identifiers import QuotaKey
from protocol.units import Units

MAX_RESETS = 1_000  # in one answer

ResetNumber = Annotated[Units, Meta(description="grows with each reset")]


class ResetKeys(Struct, frozen=True, kw_only=True):
    """The keys of one reset."""

    number: ResetNumber
    keys: list[QuotaKey]


class ResetBatch(Struct, frozen=True, kw_only=True):
    """Resets in order of their numbers; `version` is the number to ask from next."""

    version: ResetNumber
    data: list[ResetKeys]
