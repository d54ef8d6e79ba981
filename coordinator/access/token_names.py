"""Name people: an answer that has the id of a token, or of a JWT's caller, has a name beside it.

A field `X_name` of a struct is the note of the token whose id the field `X` has. The note is written when a token is
issued, is part of the sealed audit, and is left out where a token has none. The name of a JWT's caller is the one that
the issuer gives, or else the subject.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import UNSET, Struct, UnsetType, structs

from coordinator.database.connection import Connection

SUFFIX = "_name"
TokenName = str | UnsetType
JsonObject = dict[str, Any]

T = TypeVar("T", bound=Struct)


async def with_token_names(connection: Connection, rows: Sequence[T]) -> list[T]:
    """Return the rows with the names of the tokens that they, and the structs in them, have the ids of."""
    names = await _read_names(connection, {id_ for row in rows for id_ in _token_ids(row)})
    return [_named(row, names) for row in rows] if names else list(rows)


async def with_names_beside(connection: Connection, details: Sequence[JsonObject]) -> list[JsonObject]:
    """Return JSON objects with a field `X_by_name` beside each `X_by`, also in the objects in them."""
    names = await _read_names(connection, {id_ for each in details for id_ in _people(each)})
    return [_beside(each, names) for each in details]


def _people(details: JsonObject) -> Iterator[str]:
    for name, value in details.items():
        if isinstance(value, dict):
            yield from _people(value)
        elif name.endswith("_by") and isinstance(value, str):
            yield value


def _beside(details: JsonObject, names: Mapping[str, str]) -> JsonObject:
    named: JsonObject = {}
    for name, value in details.items():
        named[name] = _beside(value, names) if isinstance(value, dict) else value
        if name.endswith("_by") and isinstance(value, str) and value in names:
            named[name + SUFFIX] = names[value]
    return named


async def _read_names(connection: Connection, ids: Collection[str]) -> dict[str, str]:
    rows = await connection.fetch(_NAMES, list(ids)) if ids else []
    return {row["id"]: row["note"] for row in rows}


def _token_ids(row: Struct) -> Iterator[str]:
    for name in row.__struct_fields__:
        value = getattr(row, name)
        if isinstance(value, Struct):
            yield from _token_ids(value)
        elif name.endswith(SUFFIX) and (id_ := getattr(row, name.removesuffix(SUFFIX), None)):
            yield str(id_)


def _named(row: T, names: Mapping[str, str]) -> T:
    changes: dict[str, object] = {}
    for name in row.__struct_fields__:
        value = getattr(row, name)
        if isinstance(value, Struct):
            changes[name] = _named(value, names)
        elif name.endswith(SUFFIX):
            changes[name] = names.get(str(getattr(row, name.removesuffix(SUFFIX), None)), UNSET)
    return structs.replace(row, **changes)


# Ids are texts here, for the audit also has actors that are no tokens.
_NAMES = """
SELECT id::text AS id, note FROM token WHERE id::text = ANY ($1::text[]) AND note <> ''
UNION ALL
SELECT id::text, coalesce(nullif(name, ''), subject) FROM identity WHERE id::text = ANY ($1::text[])
"""
