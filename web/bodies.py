"""Decode JSON bodies strictly, and encode responses.

msgspec decodes and validates in one pass. Two things that it accepts are refused here as well: a name that occurs twice
in an object, of which two programs could read different values, and U+0000, which Postgres cannot store. Its messages
are split into a field, a rule and a reason, for programs.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from enum import EnumType
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from web.problems import InvalidParameter, Problem

JSON = "application/json"
MOST_SEARCHED = 64  # entries of an object, for the one that is at fault
LONGEST_SEARCHED = 16_384  # characters of a body
T = TypeVar("T")

# --- in --------------------------------------------------------------------------------------------------------------


async def read_body(request: Request, type_: type[T]) -> T:
    """Return the body of a request as `type_`, or raise a Problem."""
    return decode(await read_json(request), type_)


async def read_json(request: Request) -> bytes:
    """Return the body of a request that says it is JSON, undecoded."""
    refuse_other_media(request)
    return await request.body()


async def read_parts(request: Request, type_: type[T]) -> T:
    """Return the body of a request as `decode_parts` does."""
    return decode_parts(await read_json(request), type_)


def decode_parts(raw: bytes, type_: type[T], within: str = "") -> T:
    """Return JSON as `type_`, whose fields of type msgspec.Raw the caller decodes one by one, or raise a Problem.

    The whole is well-formed JSON then. Everything else that `decode` refuses within a part is left to the caller.
    """
    return _decoded(raw, type_, within, _refuse_repeated_in_outermost)


def decode(raw: bytes, type_: type[T], within: str = "") -> T:
    """Return JSON as `type_`, or raise a Problem. For JSON within JSON, `within` is the field that contains it."""
    value = _decoded(raw, type_, within, _refuse_repeated)
    if b"\\u0000" in raw and _NUL.search(str(raw, "utf-8")):
        _refuse(within or "body", "characters", "The character U+0000 cannot be stored.")
    return value


def _decoded(raw: bytes, type_: type[T], within: str, refuse_repeated: Callable[[object, bytes, str], None]) -> T:
    try:
        text = str(raw, "utf-8")
        value: T = _decoder(type_).decode(text)
        refuse_repeated(value, raw, text)
    except msgspec.ValidationError as error:
        read = functools.partial(json.loads, text) if len(text) <= LONGEST_SEARCHED else None
        raise invalid(error, within, type_, read) from None
    except UnicodeDecodeError as error:
        _not_json(f"The body is not UTF-8: {error.reason} at byte {error.start}.", within)
    except msgspec.DecodeError as error:
        _not_json(f"{error}." if raw.strip() else "The body is empty.", within)
    except RecursionError:
        _not_json("The body is nested too deeply.", within)
    except _Repeated as repeated:
        _refuse(_joined(within, repeated.name), "duplicate", "The name occurs more than once in one object.")
    return value


def invalid(
    error: msgspec.ValidationError, within: str = "", type_: Any = None, read: Callable[[], Any] | None = None
) -> Problem:
    """Return msgspec's message as a Problem with field, rule and reason.

    With the type, the reason has the values of an enumeration. With `read`, which returns the invalid value and lets it
    be changed, the field has the names of entries.
    """
    message, _, path = str(error).partition(" - at `")
    named = re.search(r"(?:missing required|contains unknown) field `(.*)`$", message, re.DOTALL)
    at = _field(path) if read is None else _field_at_fault(error, type_, read)
    field = _joined(within, _joined(at, named[1] if named else "")) or "body"
    if choices := _choices(type_, _PARTS.findall(_field(path))) if _rule(message) == "enum" else []:
        message = f"{message}: write {', '.join(choices)}"
    parameter = InvalidParameter(field[:256], _rule(message), message[:256])
    return Problem("invalid-request", f"{parameter.field}: {parameter.reason}", invalid_parameters=[parameter])


def _choices(type_: Any, parts: Sequence[str]) -> list[str]:
    """Return the values of the enumeration at a path below a type."""
    origin, inner = get_origin(type_), get_args(type_)
    if origin is Annotated:
        return _choices(inner[0], parts)
    if origin in (Union, UnionType):
        return [value for each in inner for value in _choices(each, parts)]
    if not parts:
        values = inner if origin is Literal else type_ if isinstance(type_, EnumType) else ()
        return [str(each) for each in values]
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        types = {field.encode_name: field.type for field in msgspec.structs.fields(type_)}
        return _choices(types.get(parts[0]), parts[1:])
    return _choices(inner[-1], parts[1:]) if inner else []


def _field_at_fault(error: msgspec.ValidationError, type_: Any, read: Callable[[], Any]) -> str:
    """Return the field of an error, with the name of an object's entry wherever msgspec's path has `[...]`.

    The entry at fault is the one that has the same fault alone. `read` returns a value that may be changed for that.
    """
    path = str(error).partition(" - at `")[2]
    parts = _PARTS.findall(_field(path)) + ([_ENTRY] if path.startswith("key`") else [])
    if _ENTRY not in parts:
        return _field(path)
    try:
        whole = [read()]
    except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
        return _field(path)
    holder: Any = whole
    at: str | int = 0
    field = ""
    for part in parts:
        if part == _ENTRY:
            name = _entry_at_fault(error, type_, whole, holder, at)
            if name is None:
                return _field(path)
            holder, at, field = holder[at], name, f"{field}.{name}"
        else:
            holder, at, field = holder[at], int(part[1:-1]) if part[0] == "[" else part, _joined(field, part)
    return field.removeprefix(".")


def _entry_at_fault(error: msgspec.ValidationError, type_: Any, whole: list[Any], holder: Any, at: Any) -> str | None:
    """Reduce the object `holder[at]` to the entry that is at fault, and return its name. Few entries are searched."""
    entries = holder[at]
    for name in itertools.islice(entries, MOST_SEARCHED):
        holder[at] = {name: entries[name]}
        try:
            msgspec.convert(whole[0], type_)
        except msgspec.ValidationError as alone:
            if str(alone) == str(error):
                return str(name)
    return None


async def read_compressed_json(request: Request, most_bytes: int) -> bytes:
    """Return the JSON body of a request, which may be in gzip, and has at most so many bytes without it."""
    _refuse_other_types(request)
    raw = await request.body()
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "gzip":
        return await asyncio.to_thread(_inflated, raw, most_bytes)
    if encoding != "identity":
        raise Problem("unsupported-media-type", "Send the body as it is, or in gzip.")
    return raw


def _inflated(raw: bytes, most_bytes: int) -> bytes:
    gzip = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        found = gzip.decompress(raw, most_bytes)
    except zlib.error as error:
        raise Problem("bad-request", f"The body is not in gzip: {error}.") from None
    if gzip.unconsumed_tail:
        raise Problem("body-too-large", f"The body is too large: without gzip it may have {most_bytes} bytes.")
    if not gzip.eof:
        raise Problem("bad-request", "The body in gzip ends too early.")
    return found


def refuse_other_media(request: Request) -> None:
    """Refuse a body that does not say it is JSON in UTF-8, or that is compressed."""
    _refuse_other_types(request)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem("unsupported-media-type", "Send the body as it is, without Content-Encoding.")


def _refuse_other_types(request: Request) -> None:
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    if media_type.strip().lower() != JSON:
        raise Problem("unsupported-media-type", f"Send {JSON}, not {media_type[:64] or 'a body without a type'}.")
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]*)", parameters, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8"):
        raise Problem("unsupported-media-type", "Send JSON in UTF-8, as RFC 8259 has it.")


_decoder: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(msgspec.json.Decoder)


def _refuse_repeated(value: object, raw: bytes, text: str) -> None:
    """Refuse a repeated name. A body that equals the encoding of its value has none, and is not searched."""
    if msgspec.json.encode(value) == raw:
        return
    with contextlib.suppress(msgspec.DecodeError):  # numbers that can only be decoded with a type
        if msgspec.json.encode(msgspec.json.decode(raw)) == raw:
            return
    _UNIQUE.decode(text)


class _Repeated(Exception):
    def __init__(self, name: str) -> None:
        self.name = name


def _unique(pairs: list[tuple[str, object]]) -> None:
    repeated = _repeated_name(pairs)
    if repeated is not None:
        raise _Repeated(repeated)


def _repeated_name(pairs: list[tuple[str, object]]) -> str | None:
    if len({name for name, _ in pairs}) == len(pairs):
        return None
    seen: set[str] = set()
    return next((name for name, _ in pairs if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


def _refuse_repeated_in_outermost(value: object, raw: bytes, text: str) -> None:
    """Refuse a repeated name in the outermost object, which is the last one that the decoder completes."""
    if msgspec.json.encode(value) == raw:
        return
    repeated: list[str | None] = [None]

    def note(pairs: list[tuple[str, object]]) -> None:
        repeated[0] = _repeated_name(pairs)

    json.JSONDecoder(object_pairs_hook=note, parse_int=float).decode(text)
    if repeated[0] is not None:
        raise _Repeated(repeated[0])


# Checks names, and builds nothing. Numbers are read as float, which takes any number of digits.
_UNIQUE = json.JSONDecoder(object_pairs_hook=_unique, parse_int=float)
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # not where the backslash itself is escaped


def _not_json(detail: str, within: str) -> NoReturn:
    if within:  # the outer body was JSON: one of its fields is not
        _refuse(within, "json", detail)
    raise Problem("invalid-json", detail) from None


def _refuse(field: str, rule: str, reason: str) -> NoReturn:
    field = field[:256]
    parameter = InvalidParameter(field, rule, reason)
    raise Problem("invalid-request", f"{field}: {reason}", invalid_parameters=[parameter]) from None


# Rules in the words of JSON Schema, by how msgspec's messages begin. The first match counts.
_RULES = (
    (re.compile(r"Object missing required field"), "required"),
    (re.compile(r"Object contains unknown field"), "unknown"),
    (re.compile(r"Expected `\w+` of length >="), "min_length"),
    (re.compile(r"Expected `\w+` of length"), "max_length"),
    (re.compile(r"Expected `\w+` matching regex"), "pattern"),
    (re.compile(r"Expected `\w+` >"), "minimum"),
    (re.compile(r"Expected `\w+` <|.* out of range"), "maximum"),
    (re.compile(r"Expected `\w+` that's a multiple"), "multiple_of"),
    (re.compile(r"Expected .*, got "), "type"),
    (re.compile(r"Invalid enum value"), "enum"),
    (re.compile(r"Invalid "), "format"),
)


_ENTRY = "[...]"  # of msgspec's paths: any entry of an object
_PARTS = re.compile(r"\[[^\]]+\]|[^.\[]+")


def _rule(message: str) -> str:
    return next((rule for pattern, rule in _RULES if pattern.match(message)), "invalid")


def _field(path: str) -> str:
    """Return the field of msgspec's path: `subject.tenant` for "$.subject.tenant`", without what precedes the `$`."""
    return path.rstrip("`").rpartition("$")[2].removeprefix(".")


def _joined(outer: str, inner: str) -> str:
    return f"{outer}.{inner}" if outer and inner and not inner.startswith("[") else outer + inner


# --- out -------------------------------------------------------------------------------------------------------------


def reply(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type=JSON)
