"""Enumerations of messages between our own services, to which a newer release may add values."""

from enum import StrEnum
from typing import Self


class OpenEnum(StrEnum):
    """An enumeration that keeps a value which it does not know as it is.

    Such a value equals no member, so a reader treats it as its case for all others, and logs and metrics show it. It is
    for answers only: in a request, an unknown value is a mistake that has to be refused.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown
