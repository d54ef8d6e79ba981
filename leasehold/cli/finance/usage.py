"""`leasehold usage` and `export`: what was used, and usage lines as a file."""

import hashlib
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from leasehold.cli.api import Cli, answer, api_command, fields, pair, print_csv
from leasehold.cli.output import fail, warn, written_whole
from protocol.counting import counted

commands = typer.Typer()
POLL_S = 0.2
ATTEMPTS = 5
Period = Annotated[str, typer.Argument(metavar="PERIOD", help="Such as 2026-10, 2026-10-31 or 2026-10-31T09; UTC.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV, for a spreadsheet.")]
AsOf = Annotated[
    str | None, typer.Option("--as-of", help="A sealed position or a time, for an answer that never changes.")
]


# --- usage ------------------------------------------------------------------------------------------------------------


@api_command(commands, scope="usage:read")
def usage(
    cli: Cli,
    start: Annotated[
        str | None, typer.Option("--from", help="A date or an RFC 3339 time.", show_default="this month")
    ] = None,
    end: Annotated[str | None, typer.Option("--to", help="The first moment that is not included.")] = None,
    granularity: Annotated[str | None, typer.Option(help="PT1M, PT1H, P1D or P1M.", show_default="one sum")] = None,
    time_zone: Annotated[
        str | None, typer.Option("--time-zone", help="A time zone, such as Europe/Berlin.", show_default="UTC")
    ] = None,
    group_by: Annotated[str | None, typer.Option("--group-by", "-g", help="Such as tenant,region.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="Such as tenant=acme; repeatable.")] = None,
    zeros: Annotated[bool, typer.Option("--zeros", help="Include intervals in which nothing was used.")] = False,
    as_of: AsOf = None,
    as_csv: Csv = False,
) -> None:
    """Print the usage of an interval, and whether more may still be reported for it."""
    asked = {"from": start, "to": end, "granularity": granularity, "time_zone": time_zone, "group_by": group_by}
    found = _all_pages(cli, {**asked, "zeros": zeros, "as_of": as_of, **_filters(only or [])})
    if cli.as_json:
        cli.print_json(found)
        return
    columns = ["from", "to", *dict.fromkeys(group_by.split(",") if group_by else ()), "units"]
    rows = [{**each, **each["dimensions"]} for each in found["data"]]
    if as_csv:
        print_csv([columns, *([row[name] for name in columns] for row in rows)])
    else:
        cli.render(rows, fields(*columns))
    _warn_about(found["coverage"])


def _filters(only: list[str]) -> dict[str, list[str]]:
    filters: dict[str, list[str]] = {}
    for text in only:
        name, value = pair(text, "--only FIELD=VALUE, such as tenant=acme")
        filters.setdefault(name, []).append(value)
    return filters


def _all_pages(cli: Cli, params: dict[str, Any]) -> dict[str, Any]:
    """Return all pages as one answer. They are read at one position of the ledger."""
    whole: dict[str, Any] = cli.get("/v1/usage", **params)
    page = whole
    while after := page["page"]["next"]:
        page = cli.get("/v1/usage", **params, page_after=after)
        whole["data"] += page["data"]
    return whole | {"page": {"next": None}}


def _warn_about(coverage: dict[str, Any]) -> None:
    if not coverage["is_known"]:
        warn("the ledger has no such tenant, quota, policy or region")
    elif coverage["unaccounted"]:
        warn(f"regions hold {counted(coverage['unaccounted'], 'unit')} more: leased, and not reported as used so far")


# --- exports ----------------------------------------------------------------------------------------------------------


@api_command(commands, scope="usage:read")
def export(
    cli: Cli,
    period: Period,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file; an existing one is replaced.")],
    tenant: Annotated[str | None, typer.Option("--tenant", "-t", help="Only lines of this tenant.")] = None,
    format_: Annotated[str, typer.Option("--format", help="csv, ndjson or parquet.")] = "csv",
) -> None:
    """Export every usage line of a period up to the newest seal, and check the file's SHA-256.

    A download that breaks is resumed. Ctrl-C before the export is made cancels it.
    """
    body = {"period": period, "format": format_} | ({"tenant": tenant} if tenant else {})
    with written_whole(output) as partial:
        manifest = _finished(cli, cli.post("/v1/exports", body))
        _download(cli, manifest, partial)
    state = "final" if manifest["is_final"] else f"as of position {manifest['ledger_head']['position']}, not final"
    cli.report(manifest, f"{output}: {counted(manifest['rows'], 'line')}, sha256 {manifest['sha256']}; {state}")


def _finished(cli: Cli, manifest: dict[str, Any]) -> dict[str, Any]:
    """Wait until the export is made. Ctrl-C cancels it, so that it is not made in vain."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    path = f"/v1/exports/{manifest['id']}"
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("lines", total=None)
            while manifest["finished_at"] is None:
                progress.update(task, completed=manifest["rows"], total=manifest["rows_expected"])
                if manifest["cancelled_at"] is not None:
                    fail("the export was cancelled; request a new one")
                time.sleep(POLL_S)
                manifest = cli.get(path)
    except KeyboardInterrupt:
        cli.client.post(f"{path}:cancel")
        raise
    return manifest


def _download(cli: Cli, manifest: dict[str, Any], partial: Path) -> None:
    """Download the file, and resume a few times where the connection breaks."""
    import httpx

    for attempt in range(1, ATTEMPTS + 1):
        try:
            _resume(cli, manifest, partial)
        except httpx.TransportError:
            if attempt == ATTEMPTS:
                raise
        else:
            break
    with partial.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != manifest["sha256"]:
            fail(f"{partial} is not what was exported: its SHA-256 differs from the manifest's")


def _resume(cli: Cli, manifest: dict[str, Any], partial: Path) -> None:
    size = partial.stat().st_size
    headers = {"Accept-Encoding": "identity", "If-Range": f'"{manifest["sha256"]}"'}
    headers |= {"Range": f"bytes={size}-"} if size else {}
    with cli.client.stream("GET", f"/v1/exports/{manifest['id']}/data", headers=headers) as response:
        if not response.is_success:
            answer(response)
        with partial.open("ab") as file:
            for piece in response.iter_bytes():
                file.write(piece)
