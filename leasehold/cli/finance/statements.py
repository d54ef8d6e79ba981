"""`leasehold statement`: who is billed in a period, what each tenant is billed for, and all statements as one file."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from leasehold.cli.api import Cli, Column, answer, api_command, fields, segment
from leasehold.cli.finance.usage import AsOf, Csv, Period
from leasehold.cli.output import fail, written_whole
from protocol.counting import counted

statement = typer.Typer(no_args_is_help=True, help="Look at what tenants are billed for.")

FORMATS = (".pdf", ".html", ".xlsx", ".csv", ".json")
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="A file that ends with .pdf, .html, .xlsx, .csv or .json.")
]

SUMMARY: dict[str, Column] = {
    **fields("tenant", "name"),
    "external ids": lambda row: ", ".join(f"{system}={id_}" for system, id_ in row["external_ids"].items()),
    **fields("billed", "is_final", "as_of"),
}


@api_command(statement, scope="usage:read", name="list")
def list_statements(cli: Cli, period: Period, as_of: AsOf = None) -> None:
    """List who is billed in a period, and how much."""
    cli.render(cli.get_all(f"/v1/periods/{segment(period)}/statements", as_of=as_of), SUMMARY)


@api_command(statement, scope="usage:read", name="export")
def export_statements(
    cli: Cli,
    period: Period,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file: .csv, .ndjson or .xlsx.")],
    as_of: AsOf = None,
) -> None:
    """Write the lines of all statements of a period into one file, a row each.

    Each row has its tenant, period, position and whether it is final, so files of several periods can be joined.
    """
    from coordinator.usage.rules.sheet import csv_file, xlsx_of

    if output.suffix not in (".csv", ".ndjson", ".xlsx"):
        fail(f"{output}: name a file that ends with .csv, .ndjson or .xlsx")
    path = f"/v1/periods/{segment(period)}/statements"
    found = cli.get_all(path, as_of=as_of, lines=True, page_size=100)
    rows = [row for each in found for row in _stacked(each)]
    if output.suffix == ".ndjson":
        import msgspec

        content = msgspec.json.Encoder().encode_lines(rows)
    else:
        table = [list(STACKED), *(list(row.values()) for row in rows)]
        content = xlsx_of([("Statements", table)]) if output.suffix == ".xlsx" else csv_file(table)
    write_file(output, content)
    cli.report(found, f"{output}: {counted(len(rows), 'line')} of {counted(len(found), 'statement')}")


_OF_STATEMENT = ("tenant", "name", "external_ids", "period", "as_of", "is_final", "statement")
_OF_LINE = ("n", "kind", "quota", "charge_period", "region", "units")
_OF_ADJUSTMENT = ("adjusted", "document", "reason")
STACKED = (*_OF_STATEMENT, *_OF_LINE, *_OF_ADJUSTMENT)


def _stacked(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    ids = ", ".join(f"{system}={id_}" for system, id_ in found["external_ids"].items())
    of_statement = {**found, "external_ids": ids, "is_final": str(found["is_final"]).lower(), "statement": found["id"]}
    for line in found["lines"]:
        made = line["adjustment"] or {}
        adjusted = {"adjusted": made.get("units"), "document": made.get("document"), "reason": made.get("reason")}
        values = {**of_statement, **line, **adjusted}
        yield {name: values[name] for name in STACKED}


LINE: dict[str, Column] = {
    **fields("n", "kind", "quota", "charge_period", "region", "units"),
    "document": lambda line: (line["adjustment"] or {}).get("document", ""),
}
LIMIT: dict[str, Column] = {
    **fields("quota_key", "kind", "units", "mode", "cap"),
    "from": lambda limit: _to_the_second(limit["from"]),
    "to": lambda limit: _to_the_second(limit["to"]),
    **fields("plan", "reason", "document"),
}
MONTH_LINE: dict[str, Column] = {**fields("n", "kind", "quota", "units"), "document": LINE["document"]}
REPORT = fields("position", "region", "epoch", "lane", "seq", "units", "body_hash", "movement_id")


@api_command(statement, scope="usage:read", name="show")
def show_statement(
    cli: Cli,
    period: Period,
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="The tenant.")],
    line: Annotated[
        int | None, typer.Option("--line", help="Print the reports behind this line instead of the statement.")
    ] = None,
    as_of: AsOf = None,
    as_csv: Csv = False,
    as_html: Annotated[bool, typer.Option("--html", help="Print a page that can be put on paper.")] = False,
    output: Output = None,
) -> None:
    """Print what a tenant is billed for, and the limits that were in force. It is final once the period is closed."""
    path = f"/v1/periods/{segment(period)}/statement"
    params = {"tenant": tenant} | ({"as_of": as_of} if as_of else {})
    if output is not None:
        _save(cli, path, params, output)
        return
    if as_csv or as_html:
        typer.echo(_in_format(cli, path, params, "csv" if as_csv else "html"), nl=False)
        return
    found = cli.get(path, tenant=tenant, as_of=as_of)
    if line is not None:
        at = None if found["is_final"] else found["as_of"]
        cli.render(cli.get_all(f"/v1/statements/{found['id']}/lines/{line}/reports", as_of=at), REPORT)
        return
    if cli.as_json:
        cli.print_json(found)
        return
    cli.render(found["lines"], LINE)
    cli.render(found["limits"], LIMIT)
    state = "final" if found["is_final"] else f"as of position {found['as_of']}, not final"
    typer.echo(f"billed: {counted(found['billed'], 'unit')}; {state}; not accounted for yet: {found['unaccounted']}")


@api_command(statement, scope="usage:read", name="month")
def show_month(
    cli: Cli,
    tenant: Annotated[str, typer.Argument(help="The tenant.")],
    month: Annotated[str, typer.Argument(help="Such as 2026-11.")],
    as_of: AsOf = None,
    output: Output = None,
) -> None:
    """Print what a tenant is billed for in all periods that end in a month: hours, days, months and anniversaries."""
    path = f"/v1/tenants/{segment(tenant)}/statements/{segment(month)}"
    if output is not None:
        _save(cli, path, {"as_of": as_of} if as_of else {}, output)
        return
    found = cli.get(path, as_of=as_of)
    if cli.as_json:
        cli.print_json(found)
        return
    cli.render(found["lines"], MONTH_LINE)
    state = "final" if found["is_final"] else f"as of position {found['as_of']}, not final"
    typer.echo(f"billed: {counted(found['billed'], 'unit')} in {counted(len(found['periods']), 'period')}; {state}")


@api_command(statement, scope="audit:read", name="proof")
def save_proof(
    cli: Cli,
    period: Period,
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="The tenant.")],
    line: Annotated[int, typer.Option("--line", help="The number of the line.")],
    seal: Annotated[
        int | None, typer.Option("--seal", help="The number of the seal that you kept.", show_default="the last needed")
    ] = None,
    as_of: AsOf = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory for the files.")] = Path(),
) -> None:
    """Save the proof of a statement's line as files, and print the command that checks them.

    The check is a script in the guide to auditing. It needs no coordinator, and the hash of a seal that you kept.
    Reading the statement needs the scope `usage:read` as well.
    """
    found = cli.get(f"/v1/periods/{segment(period)}/statement", tenant=tenant, as_of=as_of)
    path, at = f"/v1/statements/{found['id']}/lines/{line}/proof", None if found["is_final"] else found["as_of"]
    parts, after = list[dict[str, Any]](), None
    while not parts or after:
        parts.append(cli.get(path, as_of=at, seal=seal, page_after=after))
        after = parts[-1]["page"]["next"]
    if cli.as_json:
        cli.print_json(parts)
        return
    files = [output / f"proof-{number}.json" for number in range(1, len(parts) + 1)]
    for file, part in zip(files, parts, strict=True):
        write_file(file, json.dumps(part, ensure_ascii=False).encode())
    typer.echo(f"python3 check.py HASH-OF-SEAL-{parts[-1]['seals'][-1]['sealed'][0]} {' '.join(map(str, files))}")


def write_file(file: Path, content: bytes) -> None:
    """Replace a file as a whole."""
    with written_whole(file) as partial:
        partial.write_bytes(content)


def _save(cli: Cli, path: str, params: dict[str, str], output: Path) -> None:
    """Write a statement into a file, in the format that its name ends with."""
    if output.suffix not in FORMATS:
        fail(f"{output}: name a file that ends with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    write_file(output, _in_format(cli, path, params, output.suffix.removeprefix(".")))


def _in_format(cli: Cli, path: str, params: dict[str, str], format_: str) -> bytes:
    response = cli.client.get(path, params={**params, "format": format_})
    if not response.is_success:
        answer(response)
    return response.content


def _to_the_second(moment: str | None) -> str | None:
    return moment and re.sub(r"\.\d+Z$", "Z", moment)
