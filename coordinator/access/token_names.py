"""Name people: an answer that has the id of a token has the token's note beside it.

A field `X_name` of a struct is the note of the token whose id the field `X` has. The note is written when a token is
issued, is part of the sealed audit, and is left out where a token has none.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from msgspec import UNSET, Struct, UnsetType, structs

from coordinator.database.connection import Connection

SUFFIX = "_name"
TokenName = str | UnsetType

T = TypeVar("T", bound=Struct)


async def with_token_names(connection: Connection, rows: Sequence[T]) -> list[T]:
    """Return the rows with the names of the tokens that they, and the structs in them, have the ids of."""
    ids = {id_ for row in rows for id_ in _token_ids(row)}
    if not ids:
        return list(rows)
    names = {row["id"]: row["note"] for row in await connection.fetch(_NAMES, list(ids))}
    return [_named(row, names) for row in rows]


def _token_ids(row: Struct) -> Iterator[str]:
    for name in row.__struct_fields__:
        value = getattr(row, name)
        if isinstance(value, Struct):
            yield from _token_ids(value)
        elif name.endswith(SUFFIX) and (id_ := getattr(row, name.removesuffix(SUFFIX), None)):
            yield str(id_)


def _named(row: T, names: dict[str, str]) -> T:
    changes: dict[str, object] = {}
    for name in row.__struct_fields__:
        value = getattr(row, name)
        if isinstance(value, Struct):
            changes[name] = _named(value, names)
        elif name.endswith(SUFFIX):
            changes[name] = names.get(str(getattr(row, name.removesuffix(SUFFIX), None)), UNSET)
    return structs.replace(row, **changes)


# Ids are texts here, for the audit also has actors that are no tokens.
_NAMES = "SELECT id::text AS id, note FROM token WHERE id::text = ANY ($1::text[]) AND note <> ''"
