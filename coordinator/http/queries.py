"""Query strings, read strictly: what is not known, or given twice, is refused, and every fault is named at once.

A door reads its parameters one by one, each with the function that understands it, and then asks `checked`: only then
do the values count.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import Request

from protocol.units import Units
from web.problems import InvalidParameter, Problem

T = TypeVar("T")
D = TypeVar("D")
E = TypeVar("E", bound=StrEnum)

DEFAULT_PAGE_SIZE = 1000
MAX_PAGE_SIZE = 10_000
MAX_VALUES = 100


class Query:
    def __init__(self, request: Request) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in request.query_params.multi_items():
            self._values.setdefault(name, []).append(value)
        self._read: set[str] = set()
        self._faults: list[InvalidParameter] = []

    def one(self, name: str, parse: Callable[[str], T], default: D) -> T | D:
        """The parameter, or the default where there is none and where it is refused."""
        values = self._take(name)
        if len(values) > 1:
            self.refuse(name, "once", "it is given more than once")
        if len(values) != 1:
            return default
        return self._parsed(name, values[0], parse, default)

    def many(self, name: str, parse: Callable[[str], T]) -> list[T]:
        """The parameter's values, in their order; the same value twice counts once."""
        values = list(dict.fromkeys(self._take(name)))
        if len(values) > MAX_VALUES:
            self.refuse(name, "length", f"at most {MAX_VALUES} values can be given")
            return []
        parsed = [self._parsed(name, value, parse, None) for value in values]
        return [value for value in parsed if value is not None]

    def page(self, *question: object, size: int = DEFAULT_PAGE_SIZE) -> "Page":
        """`page_size` and `page_after`, for the list that this question asks for."""
        size = self.one("page_size", a_page_size, size)
        first = Cursor(question_digest(*question))
        cursor = self.one("page_after", read_cursor, first)
        if cursor.question != first.question:
            self.refuse("page_after", "question", "it belongs to another question; begin again without it")
        return Page(size, cursor)

    def refuse(self, name: str, rule: str, reason: str) -> None:
        self._faults.append(InvalidParameter(name, rule, reason))

    def checked(self) -> None:
        """Raises what is wrong with the whole of it."""
        for name in self._values.keys() - self._read:
            self.refuse(name, "unknown", f"there is no such parameter; there are {', '.join(sorted(self._read))}")
        if self._faults:
            raise Problem("invalid-request", "the query is not valid", invalid_parameters=sorted(self._faults))

    def _take(self, name: str) -> list[str]:
        self._read.add(name)
        return self._values.get(name, [])

    def _parsed(self, name: str, text: str, parse: Callable[[str], T], default: D) -> T | D:
        try:
            return parse(text)
        except ValueError as error:
            self.refuse(name, "format", str(error))
            return default


def one_of(choices: type[E]) -> Callable[[str], E]:
    def parse(text: str) -> E:
        try:
            return choices(text)
        except ValueError as error:
            raise ValueError(f"it is one of {', '.join(choices)}") from error

    return parse


def a_flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("it is true or false")
    return text == "true"


def a_text(text: str) -> str:
    """What a name in the books can be."""
    if not 1 <= len(text) <= 256 or not text.isprintable():
        raise ValueError("it is a text of 1 to 256 printable characters")
    return text


def a_number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise ValueError("it is a whole number")
    return int(text)


def a_page_size(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 6 or not 1 <= int(text) <= MAX_PAGE_SIZE:
        raise ValueError(f"it is a whole number from 1 to {MAX_PAGE_SIZE}")
    return int(text)


# --- cursors: where a list goes on. Opaque, and good for nothing but the question they were given for -----------------


class Cursor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    question: str  # a digest: a cursor leads on in one list only
    after: str = ""  # the last row of the page before, where rows have a name
    skip: Units = 0  # how many rows came before, where they have none
    as_of: Units = 0


class Page(NamedTuple):
    """Which part of a list is asked for."""

    size: int
    cursor: Cursor

    def next(self, *, after: str = "", skip: int = 0, as_of: int = 0) -> str:
        return write_cursor(Cursor(self.cursor.question, after, skip, as_of))

    def links(self, rows: Sequence[T], name_of: Callable[[T], str]) -> dict[str, str | None]:
        """Of a list by name, of which one row more than the page was read to see whether there is one."""
        return {"next": self.next(after=name_of(rows[self.size - 1])) if len(rows) > self.size else None}


def question_digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def write_cursor(cursor: Cursor) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(cursor)).decode().rstrip("=")


def read_cursor(text: str) -> Cursor:
    try:
        plain = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
        cursor = msgspec.json.decode(plain, type=Cursor)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ValueError("it is not the `next` of a page") from error
    if not cursor.after.isprintable():
        raise ValueError("it is not the `next` of a page")
    return cursor


# --- what OpenAPI says of it -----------------------------------------------------------------------------------------

INTEGER: dict[str, Any] = {"type": "integer"}
TEXT: dict[str, Any] = {"type": "string"}
FLAG: dict[str, Any] = {"type": "boolean"}
PAGE = {
    "page_size": ("how many rows at most", INTEGER | {"minimum": 1, "maximum": MAX_PAGE_SIZE}),
    "page_after": ("`page.next` of the page before; the other parameters stay as they are", TEXT),
}


def with_query(route: dict[str, Any], parameters: Mapping[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """What `described` says of a route, and its query parameters: {name: (description, schema)}."""
    listed = [
        {"name": name, "in": "query", "required": False, "description": text, "schema": schema}
        for name, (text, schema) in parameters.items()
    ]
    return route | {"openapi_extra": route["openapi_extra"] | {"parameters": listed}}


def choices(kind: type[StrEnum]) -> dict[str, Any]:
    return TEXT | {"enum": [each.value for each in kind]}


def several(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


def number_of(name: str, text: str) -> int:
    """Of a path."""
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        fault = InvalidParameter(name, "format", "it is a whole number")
        raise Problem("invalid-request", f"{name}: {fault.reason}", invalid_parameters=[fault])
    return int(text)
