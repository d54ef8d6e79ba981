"""Commands that call the coordinator's API: their common options, their calls, and how they print results."""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, NoReturn, ParamSpec
from urllib.parse import quote

import typer

from leasehold.cli.environment import secret_of
from leasehold.cli.output import fail, fail_for_each, print_table, shown, warn
from protocol.compatibility.releases import is_too_old, peer_of, stated, too_old

if TYPE_CHECKING:
    import ssl

    import httpx

    from web.tls.context import TlsFiles

URL, TOKEN = "LEASEHOLD_URL", "LEASEHOLD_TOKEN"
TLS_FILES = ("LEASEHOLD_CA_FILE", "LEASEHOLD_CERT_FILE", "LEASEHOLD_KEY_FILE")  # for coordinators and agents
DEFAULT_URL = "http://127.0.0.1:8400"
TIMEOUT_S = 30
READY_TIMEOUT_S = 5
MAX_PAGE_SIZE = 1000

P = ParamSpec("P")
Column = str | Callable[[dict[str, Any]], str | None]  # the name of a field, or a function of the row
Command = Callable[Concatenate["Cli", P], None]


def api_command(
    group: typer.Typer, *, scope: str, name: str | None = None, changes: bool = False
) -> Callable[[Command[P]], Command[P]]:
    """Register a command that calls the API. Its first argument is a `Cli`; it gets the common options after its own.

    `changes`: the command also gets `--idempotency-key`.
    """

    def register(function: Command[P]) -> Command[P]:
        def command(url: str, as_json: bool, key: str | None = None, **arguments: Any) -> None:
            with connected(Cli(url, scope, as_json, key)) as cli:
                function(cli, **arguments)  # type: ignore[call-arg]  # made of the function's own parameters

        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        common = [_AS_JSON, _KEY, _URL] if changes else [_AS_JSON, _URL]
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own] + common
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__name__ = function.__name__
        command.__doc__ = f"{inspect.getdoc(function)}\n\nThe token in {TOKEN} needs the scope `{scope}`."
        group.command(name)(command)
        return function

    return register


def _option(name: str, default: object, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_URL = _option("url", DEFAULT_URL, Annotated[str, typer.Option("--url", envvar=URL, help="The coordinator's URL.")])
_AS_JSON = _option(
    "as_json", False, Annotated[bool, typer.Option("--json", help="Print the API's own objects, for programs.")]
)
_KEY = _option(
    "key",
    None,
    Annotated[
        str | None,
        typer.Option("--idempotency-key", help="Run the command once, however often it is repeated with this key."),
    ],
)


class Cli:
    """One run of a command: where it calls, as whom, and how it prints."""

    def __init__(self, url: str, scope: str, as_json: bool, key: str | None) -> None:
        self.url = url
        self.as_json = as_json
        self._scope = scope
        self._key = key

    @cached_property
    def client(self) -> "httpx.Client":
        """Make the client, with the token of the environment."""
        import httpx

        token = secret_of(TOKEN)
        if not token:
            how = f"`leasehold token create --scope {self._scope}`"
            fail(f"{TOKEN} is not set. It must be a token with the scope {self._scope}, such as {how} makes.")
        headers = {"Authorization": f"Bearer {token}", **stated()}
        hooks = {"response": [_refuse_too_old]}
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=TIMEOUT_S, event_hooks=hooks, verify=verification()
        )

    # --- calls

    def get(self, path: str, **params: Any) -> Any:
        return answer(self.client.get(path, params=_given(params)))

    def get_all(self, path: str, **params: Any) -> list[dict[str, Any]]:
        """Get all pages of a list."""
        return [row for page in self.pages(path, **params) for row in page]

    def get_some(self, path: str, count: int, **params: Any) -> list[dict[str, Any]]:
        """Get the first rows of a list that may be very long."""
        pages = self.pages(path, **params, page_size=min(count, MAX_PAGE_SIZE))
        return list(islice(chain.from_iterable(pages), count))

    def pages(self, path: str, **params: Any) -> Iterator[list[dict[str, Any]]]:
        after: str | None = None
        while True:
            page = self.get(path, **params, page_after=after)
            yield page["data"]
            after = page.get("page", {}).get("next")
            if not after:
                return

    def post(self, path: str, body: object = None, **headers: str) -> Any:
        return answer(self.send("POST", path, body, headers))

    def put(self, path: str, body: object) -> Any:
        return answer(self.send("PUT", path, body))

    def delete(self, path: str) -> None:
        answer(self.send("DELETE", path))

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> "httpx.Response":
        """Send a change with the command's idempotency key."""
        keyed = {"Idempotency-Key": self._key} if self._key else {}
        return self.client.request(method, path, headers={**(headers or {}), **keyed}, json=body, content=content)

    def preview(self, path: str, body: Mapping[str, Any]) -> "httpx.Response":
        """Send what `--dry-run` sends. It changes nothing, so the idempotency key stays for the change."""
        return self.client.post(path, json={**body, "dry_run": True})

    # --- results

    def render(self, found: Any, columns: Mapping[str, Column]) -> None:
        """Print a row or rows as a table with these columns, or as JSON."""
        if self.as_json:
            self.print_json(found)
            return
        rows = [found] if isinstance(found, dict) else found
        print_table(list(columns), [[_cell(each, column) for column in columns.values()] for each in rows])

    def report(self, found: Any, text: str) -> None:
        """Print a sentence about a result, or the result as JSON."""
        self.print_json(found) if self.as_json else typer.echo(text)

    def print_json(self, found: object) -> None:
        import msgspec

        typer.echo(msgspec.json.encode(found).decode())

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask before a change. Without a yes the command ends, and nothing was changed."""
        if not yes and not typer.confirm(question):
            warn("nothing was changed")
            raise typer.Exit(1)


@contextmanager
def connected(cli: Cli) -> Iterator[Cli]:
    """Close the command's connections at its end, and end it in one sentence if the coordinator does not answer."""
    with explained(cli.url):
        try:
            yield cli
        finally:
            if "client" in vars(cli):
                cli.client.close()


@contextmanager
def explained(url: str) -> Iterator[None]:
    """End the command in one sentence if what is at this URL does not answer."""
    import ssl

    import httpx

    from web.tls.reasons import describe, tls_error_in

    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
        tls_error = tls_error_in(error)
        reason = str(error) or type(error).__name__ if tls_error is None else describe(tls_error)
        fail(f"{url} does not answer: {reason}{_why_not_ready(url) if isinstance(error, httpx.ReadTimeout) else ''}")


def _why_not_ready(url: str) -> str:
    """Return the reasons of `/readyz`, which answers while the database or the store hangs, as a part of a sentence."""
    import httpx

    try:
        found = httpx.get(f"{url.rstrip('/')}/readyz", timeout=READY_TIMEOUT_S, verify=verification())
        reasons = [f"{each['code']}: {each['text']}" for each in found.json()["reasons"]]
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return ""
    return f" ({'; '.join(reasons)})" if reasons else ""


def verification() -> "ssl.SSLContext | bool":
    """Return how servers are verified, and the certificate that this command shows, as the environment says."""
    from web.tls.context import CertificatesUnusable, client_context

    files = tls_files()
    if not any(files):
        return True
    try:
        return client_context(files)
    except CertificatesUnusable as error:
        fail(f"{', '.join(TLS_FILES)}: {error}")


def tls_files() -> "TlsFiles":
    """Return the files of TLS that the environment names."""
    from web.tls.context import TlsFiles

    return TlsFiles(*(Path(named) if (named := os.environ.get(name)) else None for name in TLS_FILES))


def _refuse_too_old(response: "httpx.Response") -> None:
    """End the command if the coordinator is too old for it."""
    peer = peer_of(response.headers)
    if peer is not None and is_too_old(peer.release):
        fail(too_old("the coordinator", peer.release, "This command"))


def answer(response: "httpx.Response", *, file: str | None = None) -> Any:
    """Return the body of a success. Otherwise print each fault of the input on a line of its own, and end."""
    if not response.is_success:
        response.read()
        _give_up(response, file)
    return response.json() if response.content else None


def _give_up(response: "httpx.Response", file: str | None) -> NoReturn:
    if response.headers.get("Content-Type") != "application/problem+json":
        fail(f"{response.url.copy_with(query=None)} answered {response.status_code}, without an explanation")
    problem = response.json()
    faults = problem.get("invalid_parameters", ())
    if faults:  # the detail is the first of them
        named = f"{file}: " if file else ""
        fail_for_each(f"{named}{fault['field']}: {fault['reason']} [{fault['rule']}]" for fault in faults)
    fail(str(problem["detail"]))


def _given(params: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the parameters that the caller did not set. A flag is sent as `true`."""
    given = {name: value for name, value in params.items() if value or (value == 0 and value is not False)}
    return {name: "true" if value is True else value for name, value in given.items()}


def _cell(row: dict[str, Any], column: Column) -> str:
    value = row[column] if isinstance(column, str) else column(row)
    return "" if value is None else shown(value)


def fields(*names: str) -> dict[str, Column]:
    """Return columns that show the fields of these names."""
    return {name: name for name in names}


def person(field: str) -> Column:
    """Return a column that shows the note of the token that a field has the id of, or the id of one without a note."""
    return lambda row: row.get(f"{field}_name") or row[field]


def segment(text: str) -> str:
    """Quote a text as one segment of a path."""
    return quote(text, safe="")


def pair(text: str, example: str) -> tuple[str, str]:
    """Split FIELD=VALUE."""
    field, equals, value = text.partition("=")
    if not equals or not field:
        fail(f"{text}: write it as {example}")
    return field, value


def pairs(texts: Sequence[str], example: str) -> dict[str, str]:
    """Split several FIELD=VALUE. A field that is given twice is refused: one of its values would be dropped."""
    found: dict[str, str] = {}
    for field, value in (pair(text, example) for text in texts):
        if field in found:
            fail(f"{field} is given twice: as {found[field]} and as {value}")
        found[field] = value
    return found


def print_csv(rows: Iterable[Sequence[Any]]) -> None:
    from coordinator.usage.rules.sheet import csv_file

    typer.echo(csv_file(rows), nl=False)


def read_input(file: Path) -> bytes:
    """Read a file, or standard input for `-`."""
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        fail(f"{file}: {error.strerror}")
