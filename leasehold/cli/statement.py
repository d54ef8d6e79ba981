"""`leasehold statement`: what a tenant is billed for of a period, and where each line of it comes from."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from leasehold.cli.coordinator_api import (
    DEFAULT_URL,
    Json,
    Url,
    answer,
    asking,
    echo_json,
    every,
    part,
    show,
    text_answer,
)
from leasehold.cli.period import Period
from leasehold.cli.usage import AsOf, Csv
from protocol.counting import counted

_COLUMNS = ("n", "kind", "quota", "charge_period", "region", "units")
_LIMITS = ("quota_key", "kind", "units", "mode", "cap", "from", "to", "plan", "reason", "document")
_SOURCES = ("position", "region", "epoch", "lane", "seq", "units", "body_hash", "movement_id")


def statement(
    name: Period,
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Whose.")],
    line: Annotated[int | None, typer.Option("--line", help="Instead: the reports that this line is from.")] = None,
    as_of: AsOf = None,
    as_json: Json = False,
    as_csv: Csv = False,
    as_html: Annotated[bool, typer.Option("--html", help="Print a page for paper.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Tell what a tenant is billed for, and which limits were in force. Final once the period is closed.

    The token, with the scope usage:read, is read from LEASEHOLD_TOKEN.
    """
    asked = {"tenant": tenant} | ({"as_of": as_of} if as_of else {})
    path = f"/v1/periods/{part(name)}/statement"
    with asking(url, "usage:read") as client:
        if as_csv or as_html:
            shape = "csv" if as_csv else "html"
            typer.echo(text_answer(client.get(path, params=asked | {"format": shape})), nl=False)
            return
        found = answer(client.get(path, params=asked))
        if line is not None:
            at = {"as_of": found["as_of"]} if not found["is_final"] else {}
            found = every(client, f"/v1/statements/{found['id']}/lines/{line}/reports", **at)
    if as_json:
        echo_json(found)
    elif line is not None:
        show(list(_SOURCES), [_shown(each, _SOURCES) for each in found])
    else:
        show([*_COLUMNS, "document"], [_row(each) for each in found["lines"]])
        show(list(_LIMITS), [_shown(_to_the_second(each), _LIMITS) for each in found["limits"]])
        state = "final" if found["is_final"] else f"as of position {found['as_of']}, not final"
        typer.echo(
            f"billed: {counted(found['billed'], 'unit')}; {state}; not accounted for yet: {found['unaccounted']}"
        )


def _row(line: dict[str, Any]) -> list[str]:
    return [*_shown(line, _COLUMNS), (line["adjustment"] or {}).get("document", "")]


def _to_the_second(limit: dict[str, Any]) -> dict[str, Any]:
    """Of times: what a table has room for."""
    return limit | {name: re.sub(r"\.\d+Z$", "Z", limit[name]) for name in ("from", "to")}


def _shown(found: dict[str, Any], names: Sequence[str]) -> list[str]:
    return ["" if found[name] is None else str(found[name]) for name in names]
