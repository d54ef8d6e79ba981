"""Lists in pages, with a cursor that is opaque and leads on in the one list that it was given for."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from pydantic import Field, PlainValidator

from coordinator.http.parameters import WholeNumber
from protocol.units import Units
from web.bodies import decode
from web.problems import InvalidParameter, Problem, refused
from web.strict_routes import QueryModel

DEFAULT_PAGE_SIZE = 1000
MAX_PAGE_SIZE = 10_000
MAX_ROW_NUMBER = 2**63 - 1
NOT_A_CURSOR = "This is not the `page.next` of a page of this list."

T = TypeVar("T")


class Cursor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    question: str  # a digest of the list that the cursor belongs to
    after: Any = None  # the name of the last row of the page before, where rows have names
    skip: Units = 0  # how many rows came before, where they have none
    as_of: Units = 0


class PageLinks(msgspec.Struct, frozen=True):
    """`next` is the `page_after` of the next page. After the last page it is null."""

    next: str | None


def write_cursor(cursor: Cursor) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(cursor)).decode().rstrip("=")


def read_cursor(text: str) -> Cursor:
    """Return the cursor of a text. Raise ValueError for a text that `write_cursor` never returned."""
    try:
        plain = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
        return decode(plain, Cursor)
    except (ValueError, Problem) as error:
        raise ValueError(NOT_A_CURSOR) from error


class Page(NamedTuple):
    """The part of a list that a request asks for."""

    size: int
    cursor: Cursor

    def after(self, type_: type[T]) -> T | None:
        """Return the name of the last row of the page before. For the first page it is None."""
        if self.cursor.after is None:
            return None
        try:
            name = msgspec.convert(self.cursor.after, type_)
        except msgspec.ValidationError:
            raise _not_a_cursor() from None
        if isinstance(name, int) and not 0 <= name <= MAX_ROW_NUMBER:
            raise _not_a_cursor()
        return name

    def next(self, *, after: object = None, skip: int = 0, as_of: int = 0) -> str:
        return write_cursor(Cursor(self.cursor.question, msgspec.to_builtins(after), skip, as_of))

    def links(self, rows: Sequence[T], name_of: Callable[[T], object]) -> PageLinks:
        """Return the links of a page of which one row more than its size was read, to see whether there is one."""
        return PageLinks(self.next(after=name_of(rows[self.size - 1])) if len(rows) > self.size else None)


class PageQuery(QueryModel):
    """The query parameters of every list. A subclass adds those that choose its rows."""

    page_size: Annotated[
        WholeNumber, Field(ge=1, le=MAX_PAGE_SIZE, description="How many rows a page has at most.", examples=[100])
    ] = DEFAULT_PAGE_SIZE
    page_after: Annotated[
        Cursor | None,
        PlainValidator(read_cursor, json_schema_input_type=str),
        Field(
            description="`page.next` of the page before. The other parameters stay as they were.",
            examples=["WyIwMTIzNDU2Nzg5YWJjZGVmIiwiZXUtd2VzdCJd"],
        ),
    ] = None

    def page(self, *parts: object) -> Page:
        """Return the page that is asked for. `parts` identify the list, where the query alone does not."""
        only = self.model_dump(exclude={"page_size", "page_after"})
        return self.page_of(type(self).__name__, only, *parts)

    def page_of(self, *question: object) -> Page:
        """Return the page that is asked for, of the list that the question alone identifies."""
        digest = hashlib.sha256(repr(question).encode()).hexdigest()[:16]
        cursor = self.page_after or Cursor(digest)
        if cursor.question != digest:
            raise refused("page_after", "question", "This cursor belongs to another list. Begin again without it.")
        return Page(self.page_size, cursor)


def _not_a_cursor() -> Problem:
    return Problem(
        "invalid-request",
        f"page_after: {NOT_A_CURSOR}",
        invalid_parameters=[InvalidParameter("page_after", "format", NOT_A_CURSOR)],
    )
