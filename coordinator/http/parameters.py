"""Types of parameters and fields that several operations have, with what OpenAPI says of them."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar
from uuid import UUID

import msgspec
from fastapi import Path
from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, PlainValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from coordinator.usage.rules.usage import parse_instant
from protocol.identifiers import MAX_QUOTA_KEY_LENGTH, NAME_PATTERN, REGION_PATTERN, canonical_quota_key
from protocol.limits.document import LimitValue
from protocol.periods import period_of
from protocol.units import MAX_UNITS
from web.problems import InvalidParameter, Problem

MAX_VALUES = 100
_WHOLE_NUMBER = re.compile(r"[0-9]{1,15}", re.ASCII)

T = TypeVar("T")


def _custom(rule: str, reason: str) -> PydanticCustomError:
    return PydanticCustomError(rule, "{reason}", {"reason": reason})


# --- texts ------------------------------------------------------------------------------------------------------------


def _printable(text: str) -> str:
    if not text.isprintable():
        raise _custom("text", "The text has a character that cannot be printed.")
    return text


Printable = AfterValidator(_printable)
Text = Annotated[str, Field(min_length=1, max_length=256), Printable]
Reason = Annotated[
    str,
    Field(min_length=1, max_length=1000, description="Why. It is kept in the audit.", examples=["ticket FIN-1234"]),
    Printable,
]


def _canonical_key(text: str) -> str:
    try:
        return canonical_quota_key(text)
    except ValueError as error:
        raise _custom("format", str(error)) from None


QuotaName = Annotated[str, Field(pattern=NAME_PATTERN, description="The name of a quota.", examples=["exports"])]
QuotaKey = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_QUOTA_KEY_LENGTH,
        description="A quota, and the values it is counted by: `quota:dimension=value`.",
        examples=["exports:tenant=acme"],
    ),
    AfterValidator(_canonical_key),
]
QuotaNameOrKey = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_QUOTA_KEY_LENGTH,
        description="A quota, or a quota with the values it is counted by.",
        examples=["exports", "exports:tenant=acme"],
    ),
    AfterValidator(lambda text: _canonical_key(text) if ":" in text else text),
]
RegionName = Annotated[
    str,
    Field(pattern=REGION_PATTERN, description="A region: lower case letters, digits and -.", examples=["eu-west"]),
]
PeriodName = Annotated[str, Field(min_length=4, max_length=64, description="A period.", examples=["2026-11"])]


def _valid_period(text: str) -> str:
    try:
        return period_of(text).id
    except ValueError as error:
        raise _custom("format", str(error)) from None


ValidPeriod = Annotated[PeriodName, AfterValidator(_valid_period)]


# --- query parameters -------------------------------------------------------------------------------------------------


def _whole_number(value: object) -> object:
    """Read a decimal. pydantic would take `1.0`, ` 1` and `1_0` for whole numbers, too."""
    if isinstance(value, str):
        if not _WHOLE_NUMBER.fullmatch(value):
            raise _custom("format", "Write a whole number.")
        return int(value)
    return value


def _flag(value: object) -> object:
    if value not in ("true", "false"):
        raise _custom("format", "Write `true` or `false`.")
    return value == "true"


def _unique(values: list[T]) -> list[T]:
    return list(dict.fromkeys(values))


WholeNumber = Annotated[int, BeforeValidator(_whole_number)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Several = Annotated[tuple[T, ...], BeforeValidator(_unique), Field(max_length=MAX_VALUES)]


def _instant(text: str, info: ValidationInfo) -> datetime:
    return parse_instant(text, info.data.get("time_zone") or UTC)


# A time, or a date: midnight in the time zone that the same query names before it.
Instant = Annotated[datetime | None, PlainValidator(_instant, json_schema_input_type=str)]


# --- path parameters --------------------------------------------------------------------------------------------------


def _id_or_not_found(missing: str) -> Callable[[str], UUID]:
    def parse(text: str) -> UUID:
        try:
            return UUID(text)
        except ValueError:
            raise Problem("not-found", missing) from None

    return parse


def path_id(missing: str) -> Any:
    """Validate the id in a path. What is no UUID is the id of nothing: the Problem says `missing`."""
    return BeforeValidator(_id_or_not_found(missing))


EpochNumber = Annotated[WholeNumber, Path(description="The number of an epoch.", examples=[7])]


# --- fields of bodies -------------------------------------------------------------------------------------------------


def _moment(value: object) -> datetime:
    try:
        moment: datetime = msgspec.convert(value, _TIME)
    except msgspec.ValidationError as error:
        raise _custom("format", f"{error}. Write an RFC 3339 time with its offset.") from None
    return moment


_TIME: Any = Annotated[datetime, msgspec.Meta(tz=True)]
Moment = Annotated[
    datetime,
    PlainValidator(_moment, json_schema_input_type=AwareDatetime),
    Field(examples=["2026-11-18T09:30:00Z"]),
]
Units = Annotated[int, Field(ge=0, le=MAX_UNITS, examples=[1000])]
PositiveUnits = Annotated[int, Field(ge=1, le=MAX_UNITS, examples=[1000])]


def _limit_value(value: object) -> LimitValue:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _custom("type", "A limit is an integer, or a text such as `100/minute`.")
    return value


Limit = Annotated[
    LimitValue,
    PlainValidator(_limit_value, json_schema_input_type=int | str),
    Field(description="Units of an allowance, slots, or a rate.", examples=[1000, "100/minute"]),
]


def faults_of_end(starts: datetime, ends: datetime | None, now: datetime) -> list[InvalidParameter]:
    """Return the fault of a `valid_until` that is not in the future, or not after the beginning."""
    if ends is None or ends > max(starts, now):
        return []
    return [InvalidParameter("valid_until", "future", "The end is in the past, or before the beginning.")]
