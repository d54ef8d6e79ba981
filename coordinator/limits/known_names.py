"""Find names in the filter of a list that exist nowhere: most are misspelt, and an empty answer would look like a zero.

A name is known if the limits document in force has it, or the ledger. Where a quota may be given by its key, the name
before the colon counts. Tenants and API keys are not checked: services name them as they like.
"""

from collections.abc import Iterator, Mapping, Sequence

from coordinator.database.connection import Connection
from web.problems import InvalidParameter

MOST_LISTED = 10
NO_CLASS = "*"  # the route class of requests in none


async def faults_of_names(connection: Connection, filters: Mapping[str, Sequence[str]]) -> list[InvalidParameter]:
    """Return a fault for each unknown name in a filter by `region`, `quota`, `policy` or `route_class`."""
    faults = list[InvalidParameter]()
    for field, names in filters.items():
        wanted = {name.partition(":")[0] if field == "quota" else name for name in names}
        if statement := _KNOWN.get(field) if wanted else None:
            known = {row["name"] for row in await connection.fetch(statement, sorted(wanted))}
            faults += _faults(field, sorted(wanted - known - {NO_CLASS}), sorted(known - wanted))
    return faults


def _faults(field: str, unknown: Sequence[str], known: Sequence[str]) -> Iterator[InvalidParameter]:
    kind = field.replace("_", " ")
    more = ", …" if len(known) > MOST_LISTED else ""
    there = f"There are: {', '.join(known[:MOST_LISTED])}{more}." if known else "There is none yet."
    for name in unknown:
        yield InvalidParameter(field, "known", f"There is no {kind} {name!r}. {there}")


# All names that are configured, and of the wanted ones those that the ledger has.
_KNOWN = {
    "region": "SELECT name FROM region WHERE $1::text[] IS NOT NULL",
    "quota": """
SELECT each ->> 'name' AS name
FROM (SELECT document FROM limits_version ORDER BY version DESC LIMIT 1) AS newest,
    jsonb_array_elements(document -> 'quotas') AS each
UNION SELECT wanted.name FROM unnest($1::text[]) AS wanted(name)
WHERE EXISTS (SELECT FROM pool WHERE pool.name = wanted.name)
""",
    "policy": """
SELECT each ->> 'name' AS name
FROM (SELECT document FROM limits_version ORDER BY version DESC LIMIT 1) AS newest,
    jsonb_array_elements(document -> 'policies') AS each
UNION SELECT wanted.name FROM unnest($1::text[]) AS wanted(name)
WHERE EXISTS (SELECT FROM usage_day WHERE policy = wanted.name)
""",
    "route_class": """
SELECT jsonb_object_keys(document -> 'route_classes') AS name
FROM (SELECT document FROM limits_version ORDER BY version DESC LIMIT 1) AS newest
UNION SELECT wanted.name FROM unnest($1::text[]) AS wanted(name)
WHERE EXISTS (SELECT FROM usage_day WHERE route_class = wanted.name)
""",
}
