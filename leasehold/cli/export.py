"""`leasehold export`: every usage line of a period as a file, which is what its manifest says, or is not there."""

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leasehold.cli.coordinator_api import DEFAULT_URL, Json, Url, answer, asking, echo_json, refuse_unless_success
from leasehold.cli.failure import fail
from leasehold.cli.period import Period
from protocol.counting import counted

if TYPE_CHECKING:
    import httpx

POLL_S = 0.2
ATTEMPTS = 5


def export(
    name: Period,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file; what is in it is replaced.")],
    tenant: Annotated[str | None, typer.Option("--tenant", "-t", help="Whose lines; those of all.")] = None,
    format_: Annotated[str, typer.Option("--format", help="csv, ndjson or parquet.")] = "csv",
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Export every usage line of a period up to the newest seal, and check that the file is what was exported.

    A download that breaks is gone on with. Ctrl-C before it is made cancels it. The token, with the scope usage:read,
    is read from LEASEHOLD_TOKEN.
    """
    body = {"period": name, "format": format_} | ({"tenant": tenant} if tenant else {})
    with asking(url, "usage:read") as client:
        manifest = _made(client, answer(client.post("/v1/exports", json=body)))
        partial = output.with_name(f"{output.name}.part")
        _download(client, manifest, partial)
    partial.replace(output)
    if as_json:
        echo_json(manifest)
    else:
        state = "final" if manifest["is_final"] else f"as of position {manifest['ledger_head']['position']}, not final"
        typer.echo(f"{output}: {counted(manifest['rows'], 'line')}, sha256 {manifest['sha256']}; {state}")


def _made(client: "httpx.Client", manifest: dict[str, Any]) -> dict[str, Any]:
    """Whoever gives up waiting does not leave it to be made for nobody."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    path = f"/v1/exports/{manifest['id']}"
    try:
        with Progress(
            *Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True), transient=True
        ) as shown:
            task = shown.add_task("lines", total=None)
            while manifest["finished_at"] is None:
                shown.update(task, completed=manifest["rows"], total=manifest["rows_expected"])
                if manifest["cancelled_at"] is not None:
                    fail("it was cancelled; ask again")
                time.sleep(POLL_S)
                manifest = answer(client.get(path))
    except KeyboardInterrupt:
        client.post(f"{path}:cancel")
        raise
    return manifest


def _download(client: "httpx.Client", manifest: dict[str, Any], partial: Path) -> None:
    """Where it breaks it goes on, a few times."""
    import httpx

    partial.write_bytes(b"")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _go_on(client, manifest, partial)
        except httpx.TransportError:
            if attempt == ATTEMPTS:
                raise
        else:
            break
    with partial.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != manifest["sha256"]:
            fail(f"{partial} is not what was exported: its SHA-256 is another one")


def _go_on(client: "httpx.Client", manifest: dict[str, Any], partial: Path) -> None:
    at = partial.stat().st_size
    headers = {"Accept-Encoding": "identity", "If-Range": f'"{manifest["sha256"]}"'} | (
        {"Range": f"bytes={at}-"} if at else {}
    )
    with client.stream("GET", f"/v1/exports/{manifest['id']}/data", headers=headers) as response:
        refuse_unless_success(response)
        with partial.open("ab") as file:
            for piece in response.iter_bytes():
                file.write(piece)
