"""How commands ask a coordinator: where it is, with which token, and what a refusal says to a person."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from urllib.parse import quote

import typer

from leasehold.cli.failure import fail, say

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import httpx

    from coordinator.usage.rules.sheet import Cell

URL, TOKEN = "LEASEHOLD_URL", "LEASEHOLD_TOKEN"
TIMEOUT_S = 30

Url = Annotated[str, typer.Option("--url", envvar=URL, help="The coordinator that is asked.")]
Json = Annotated[bool, typer.Option("--json", help="Print the API's own objects, for programs.")]
Key = Annotated[
    str | None,
    typer.Option("--idempotency-key", help="The same command with the same key is done once, however often it is run."),
]
DEFAULT_URL = "http://127.0.0.1:8400"


@contextmanager
def asking(url: str, scope: str) -> Iterator["httpx.Client"]:
    """With the token of the environment: arguments can be seen by others. Where there is none, the scope is named."""
    import httpx

    token = os.environ.get(TOKEN)
    if not token:
        fail(f"{TOKEN} is not set; it must have the scope {scope} (`leasehold token create --scope {scope}`)")
    try:
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=TIMEOUT_S) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"{url} could not be asked: {str(error) or type(error).__name__}")


def answer(response: "httpx.Response", *, of: str | None = None) -> Any:
    """What it says, or the end: with every fault of the input on a line of its own."""
    if not response.is_success:
        _give_up(response, of)
    return response.json() if response.content else None


def text_answer(response: "httpx.Response") -> str:
    refuse_unless_success(response)
    return response.text


def refuse_unless_success(response: "httpx.Response") -> None:
    if not response.is_success:
        response.read()
        _give_up(response, None)


def _give_up(response: "httpx.Response", of: str | None) -> NoReturn:
    if response.headers.get("Content-Type") != "application/problem+json":
        fail(f"the answer was {response.status_code}")
    problem = response.json()
    for fault in problem.get("invalid_parameters", ()):
        say(f"{f'{of}: ' if of else ''}{fault['field']}: {fault['reason']} [{fault['rule']}]")
    fail(str(problem["detail"]))


def every(client: "httpx.Client", path: str, **params: Any) -> list[dict[str, Any]]:
    """All pages of a list."""
    rows: list[dict[str, Any]] = []
    after: str | None = None
    while True:
        page = answer(client.get(path, params=params | ({"page_after": after} if after else {})))
        rows += page["data"]
        after = page.get("page", {}).get("next")
        if not after:
            return rows


def given(**params: str | None) -> dict[str, str]:
    """Of what may be asked for, what is."""
    return {name: value for name, value in params.items() if value}


def keyed(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Idempotency-Key": key}


def part(text: str) -> str:
    """One segment of a path."""
    return quote(text, safe="")


def show(columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(*(Column(name, overflow="fold") for name in columns), box=None)
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)


def echo_json(value: object) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(value).decode())


def echo_csv(rows: "Iterable[Sequence[Cell]]") -> None:
    from coordinator.usage.rules.sheet import csv_of

    typer.echo(csv_of(rows), nl=False)


def text_of(file: Path) -> bytes:
    """A file's, or standard input's for `-`."""
    import sys

    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        fail(f"{file}: {error.strerror}")
