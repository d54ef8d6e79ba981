"""`leasehold usage`: what was used, told apart as asked, as a table, JSON or CSV."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from leasehold.cli.coordinator_api import DEFAULT_URL, Json, Url, answer, asking, echo_csv, echo_json, show
from leasehold.cli.failure import fail, say
from protocol.counting import counted

if TYPE_CHECKING:
    import httpx

Csv = Annotated[bool, typer.Option("--csv", help="Print CSV, for a spreadsheet.")]
AsOf = Annotated[str | None, typer.Option("--as-of", help="A sealed position or a time: the same answer for ever.")]


def usage(
    start: Annotated[str | None, typer.Option("--from", help="A date or an RFC 3339 time; this month.")] = None,
    end: Annotated[str | None, typer.Option("--to", help="The first moment after.")] = None,
    granularity: Annotated[str | None, typer.Option(help="PT1M, PT1H, P1D or P1M; one sum without it.")] = None,
    time_zone: Annotated[str | None, typer.Option("--time-zone", help="Such as Europe/Berlin; UTC.")] = None,
    group_by: Annotated[str | None, typer.Option("--group-by", "-g", help="Such as tenant,region.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="Such as tenant=acme; several times.")] = None,
    zeros: Annotated[bool, typer.Option("--zeros", help="Also pieces in which nothing was used.")] = False,
    as_of: AsOf = None,
    as_json: Json = False,
    as_csv: Csv = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Tell what was used. Says so if more may come, or if the books know nothing of what was asked for.

    The token, with the scope usage:read, is read from LEASEHOLD_TOKEN.
    """
    asked = {"from": start, "to": end, "granularity": granularity, "time_zone": time_zone, "group_by": group_by}
    params = {name: value for name, value in asked.items() if value is not None} | _filters(only or [])
    params |= ({"zeros": "true"} if zeros else {}) | ({"as_of": as_of} if as_of else {})
    with asking(url, "usage:read") as client:
        found = _all_pages(client, params)
    if as_json:
        echo_json(found)
        return
    names = list(dict.fromkeys((group_by or "").split(","))) if group_by else []
    columns = ["from", "to", *names, "units"]
    rows = [
        [row["from"], row["to"], *(row["dimensions"][name] for name in names), row["units"]] for row in found["data"]
    ]
    echo_csv([columns, *rows]) if as_csv else show(
        columns, [["" if cell is None else str(cell) for cell in row] for row in rows]
    )
    _tell(found["coverage"])


def _filters(only: list[str]) -> dict[str, list[str]]:
    filters: dict[str, list[str]] = {}
    for each in only:
        name, separator, value = each.partition("=")
        if not separator:
            fail(f"--only {each}: write it as tenant=acme")
        filters.setdefault(name, []).append(value)
    return filters


def _all_pages(client: "httpx.Client", params: dict[str, Any]) -> dict[str, Any]:
    """As one answer, of one position."""
    whole: dict[str, Any] = answer(client.get("/v1/usage", params=params))
    page = whole
    while after := page["page"]["next"]:
        page = answer(client.get("/v1/usage", params=params | {"page_after": after}))
        whole["data"] += page["data"]
    return whole | {"page": {"next": None}}


def _tell(coverage: dict[str, Any]) -> None:
    if not coverage["is_known"]:
        say("the books have never had what was asked for")
    elif coverage["unaccounted"]:
        say(f"with regions, and not reported yet: {counted(coverage['unaccounted'], 'unit')} more")
