"""`leasehold decisions`: why requests of a tenant were denied or admitted, from the decision log."""

from typing import Annotated, Any

import typer

from leasehold.cli.api import Cli, Column, api_command
from leasehold.cli.output import warn

commands = typer.Typer()
DEFAULT_ROWS = 20
MOST_REASONS = 5  # that the sentence names

_Tenant = Annotated[str | None, typer.Option(help="Only this tenant's.")]
_Several = list[str] | None


@api_command(commands, scope="audit:read")
def decisions(
    cli: Cli,
    tenant: _Tenant = None,
    start: Annotated[
        str | None, typer.Option("--from", help="An RFC 3339 time, or a date in UTC. Default: a day before --to.")
    ] = None,
    end: Annotated[str | None, typer.Option("--to", help="The first moment after. Default: now.")] = None,
    outcome: Annotated[
        _Several, typer.Option(help="denied, admitted or shadow_denied; repeatable. Default: all.")
    ] = None,
    reason: Annotated[_Several, typer.Option(help="Only denials for this reason; repeatable.")] = None,
    policy: Annotated[_Several, typer.Option(help="Only by this policy; repeatable.")] = None,
    quota: Annotated[_Several, typer.Option(help="Only of this quota; repeatable.")] = None,
    key: Annotated[_Several, typer.Option(help="Only of this quota key, such as api:api_key=ak_7; repeatable.")] = None,
    region: Annotated[_Several, typer.Option(help="Only in this region; repeatable.")] = None,
    operation_id: Annotated[str | None, typer.Option(help="Only of this operation of the tenant.")] = None,
    rows: Annotated[int, typer.Option(min=1, max=1000, help="How many decisions to print.")] = DEFAULT_ROWS,
) -> None:
    """Show why requests were denied or admitted, the newest first, and sum all of them up.

    Each denial is in the log, and a sample of the admissions. Equal denials of one second are one row. With --json it
    prints the first page of the API, with the summary.
    """
    only: dict[str, Any] = {"outcome": outcome, "reason": reason, "policy": policy, "quota": quota, "key": key}
    asked = {"tenant": tenant, "from": start, "to": end, "region": region, "operation_id": operation_id} | only
    found = cli.get("/v1/decisions", **asked, page_size=rows)
    if cli.as_json:
        cli.print_json(found)
        return
    if found["data"]:
        cli.render(found["data"], {name: column for name, column in _COLUMNS.items() if _has(found["data"], column)})
    for sentence in sentences_of(found["summary"], tenant):
        typer.echo(sentence)
    if found["page"]["next"]:
        warn(f"the newest {len(found['data'])} rows are printed; see --rows, or narrow --from and --to")


def sentences_of(summary: dict[str, Any], tenant: str | None) -> list[str]:
    """Return sentences that sum all decisions up: how many were denied and why, how many admitted, and what is lost."""
    whose = "" if tenant is None else f" of {tenant}"
    said = [f"{summary['denied']:,} denied{whose}{_reasons(summary, 'denied')}."]
    if summary["shadow_denied"]:
        more = _reasons(summary, "shadow_denied")
        said.append(f"{summary['shadow_denied']:,} admitted that a shadow policy would have denied{more}.")
    if summary["admitted"]:
        said.append(f"About {summary['admitted']:,} (± {summary['admitted_plus_minus']:,}) admitted, by the sample.")
    if summary["lost"]:
        said.append(f"{summary['lost']:,} decisions of these minutes, of any tenant, were lost.")
    if summary["kept_from"]:
        said.append(f"The log is kept from {summary['kept_from']} on.")
    return said


def _reasons(summary: dict[str, Any], outcome: str) -> str:
    groups = [each for each in summary["groups"] if each["outcome"] == outcome]
    named = [f"{each['decisions']:,} {_cause(each)}" for each in groups[:MOST_REASONS]]
    left = sum(each["decisions"] for each in groups[MOST_REASONS:])
    return f": {', '.join([*named, *([f'{left:,} others'] if left else [])])}" if named else ""


def _cause(group: dict[str, Any]) -> str:
    by = f" (policy {group['policy']}, quota {group['quota']})" if group["policy"] else ""
    return f"{group['reason'] or 'without a reason'}{by}"


def _has(rows: list[dict[str, Any]], column: Column) -> bool:
    return any((row[column] if isinstance(column, str) else column(row)) not in (None, "") for row in rows)


def _times(row: dict[str, Any]) -> str:
    if row["outcome"] == "admitted":
        return "" if row["weight"] == 1 else f"1 of {row['weight']:g}"
    return "" if row["count"] == 1 else str(row["count"])


def _moment(row: dict[str, Any]) -> str:
    """Return the time to the millisecond: `2026-11-19T15:00:00.123Z`."""
    whole, _, fraction = row["at"].removesuffix("Z").partition(".")
    return f"{whole}.{fraction.ljust(3, '0')[:3]}Z"


def _remaining(row: dict[str, Any]) -> str:
    """Return what remained of the region's share, and of the limit."""
    return "" if row["limit"] is None else f"{row['remaining']} of {row['share']} here, {row['limit']} in all"


def _request(row: dict[str, Any]) -> str:
    subject = row["subject"]
    return " ".join(filter(None, (subject.get("method"), subject.get("route"))))


_COLUMNS: dict[str, Column] = {
    "at": _moment,
    "outcome": "outcome",
    "times": _times,
    "reason": "reason",
    "tenant": "tenant",
    "request": _request,
    "policy": "policy",
    "key": "key",
    "cost": "cost",
    "remaining": _remaining,
    "region": "region",
    "degraded": "degraded",
}
