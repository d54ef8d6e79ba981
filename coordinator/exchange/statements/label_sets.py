"""The sets of labels that usage is told apart by, for each pool. They are written under its lock."""

from collections.abc import Iterable, Mapping, Sequence

from coordinator.database.connection import Connection
from coordinator.exchange.rules.balances import Key
from coordinator.exchange.rules.label_sets import LabelSet


async def read_known_label_sets(connection: Connection, sets: Sequence[LabelSet]) -> set[LabelSet]:
    return {LabelSet(*row) for row in await connection.fetch(_KNOWN, *_columns(sets))}


async def count_label_sets(connection: Connection, sets: Iterable[LabelSet]) -> Mapping[Key, int]:
    """Return how many sets the pools of these sets have."""
    keys = sorted({Key(each.quota, each.period) for each in sets})
    rows = await connection.fetch(_COUNT, [key.quota for key in keys], [key.period for key in keys])
    return {Key(row["quota"], row["period"]): row["sets"] for row in rows}


async def insert_label_sets(connection: Connection, sets: Sequence[LabelSet]) -> None:
    await connection.execute(_INSERT, *_columns(sets))


def _columns(sets: Sequence[LabelSet]) -> list[list[str]]:
    return [[each.quota for each in sets], [each.period for each in sets], [each.labels for each in sets]]


_KNOWN = """
SELECT quota, period, labels FROM unnest($1::text[], $2::text[], $3::text[]) AS reported (quota, period, labels)
JOIN label_set USING (quota, period, labels)
"""
_COUNT = """
SELECT quota, period, count(*) AS sets FROM unnest($1::text[], $2::text[]) AS pools (quota, period)
JOIN label_set USING (quota, period) GROUP BY 1, 2
"""
_INSERT = """
INSERT INTO label_set (quota, period, labels) SELECT * FROM unnest($1::text[], $2::text[], $3::text[])
ON CONFLICT DO NOTHING
"""
