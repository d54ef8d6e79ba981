"""`leasehold doctor`: check settings, connections, clocks, stores, the database and the ledger of an installation."""

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leasehold.cli.api import DEFAULT_URL, TOKEN, URL, tls_files, verification
from leasehold.cli.deciding.check import AGENT_TOKEN, AGENT_URL
from leasehold.cli.environment import secret_of
from leasehold.cli.output import fail, print_table, progress_line

if TYPE_CHECKING:
    from leasehold.doctor.examine import Installation
    from protocol.diagnosis.checks import CheckResult

commands = typer.Typer()
AGENTS, DATABASE, STORES = "LEASEHOLD_DOCTOR_AGENTS", "LEASEHOLD_DOCTOR_DATABASE_URL", "LEASEHOLD_DOCTOR_STORES"
VISIBLE = "Others can see arguments: use the variable for a URL with a password."


Urls = Annotated[
    list[str] | None,
    typer.Option("--url", envvar=URL, help="A coordinator's URL; repeatable.", show_default=DEFAULT_URL),
]
Agents = Annotated[
    list[str] | None, typer.Option("--agent", envvar=[AGENTS, AGENT_URL], help="An agent's URL; repeatable.")
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        envvar=DATABASE,
        help=f"Read this database as well: a role with pg_read_all_stats sees which standbys confirm. {VISIBLE}",
    ),
]
StoreUrls = Annotated[
    list[str] | None,
    typer.Option("--store-url", envvar=STORES, help=f"Ask this store as well, and measure it; repeatable. {VISIBLE}"),
]
EnvoyFiles = Annotated[
    list[Path] | None,
    typer.Option("--envoy", dir_okay=False, help="Check this configuration of Envoy as well; repeatable."),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file", exists=True, dir_okay=False, help="Certificates (PEM) to trust beside those of the machine."
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, max=600, help="Seconds for each request.")]
Codes = Annotated[list[str] | None, typer.Option("--check", help="Only the check of this code; repeatable.")]
OnlyProblems = Annotated[bool, typer.Option("--problems", help="Leave out what is ok.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings, too.")]
Listed = Annotated[bool, typer.Option("--list", help="List all checks, and run none.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


@commands.command()
def doctor(
    url: Urls = None,
    agent: Agents = None,
    database_url: DatabaseUrl = None,
    store_url: StoreUrls = None,
    envoy: EnvoyFiles = None,
    ca_file: CaFile = None,
    timeout: Timeout = 10.0,
    check: Codes = None,
    problems: OnlyProblems = False,
    strict: Strict = False,
    listed: Listed = False,
    as_json: Json = False,
) -> None:
    """Check an installation from this machine: who answers, TLS, clocks, stores, database, time-outs, jobs, webhooks.

    Exits with 0 if nothing has failed, and with 1 if a check has failed or, with --strict, warns. What could not be
    checked is `unknown`, with the reason, and does not change the exit status. The codes of the checks are stable.

    LEASEHOLD_TOKEN needs the scopes `audit:read` and `admin` (for webhooks); LEASEHOLD_AGENT_SERVICE_TOKEN is for
    agents that ask for a token. Without them fewer checks run.

    Examples:

        leasehold doctor --agent http://127.0.0.1:8411 --problems

        leasehold doctor --strict --json --check database_replication
    """
    if listed:
        _print_list(as_json=as_json)
        return
    _refuse_unknown(check or [])
    found = _examined(_installation(url, agent, database_url, store_url, envoy, ca_file, timeout), check or [])
    _print(found, problems=problems, as_json=as_json)
    counted = _counts(found)
    if counted["failed"] or (strict and counted["warning"]):
        raise typer.Exit(1)


def _installation(
    url: list[str] | None,
    agents: list[str] | None,
    database_url: str | None,
    stores: list[str] | None,
    envoy: list[Path] | None,
    ca_file: Path | None,
    timeout_s: float,
) -> "Installation":
    from leasehold.doctor.examine import Installation
    from regional_agent.store.opening import StoreAccess

    _refuse_wrong_addresses(database_url, stores or [])
    own = tls_files()
    try:
        shown = verification()  # as the environment says, for coordinators that ask for a certificate
        tls = shown if isinstance(shown, ssl.SSLContext) else ssl.create_default_context()
        if ca_file is not None:
            tls.load_verify_locations(ca_file)
    except (OSError, ssl.SSLError) as error:
        fail(f"{ca_file} cannot be read as certificates: {error}")
    return Installation(
        coordinators=[each.rstrip("/") for each in url or [DEFAULT_URL]],
        agents=[each.rstrip("/") for each in agents or []],
        token=secret_of(TOKEN),
        agent_token=(secret_of(AGENT_TOKEN) or "").partition(" ")[0] or None,
        database_url=database_url,
        store_urls=stores or [],
        store_access=StoreAccess(ca_file=ca_file or own.ca_file, cert_file=own.cert_file, key_file=own.key_file),
        envoy_files=envoy or [],
        tls=tls,
        timeout_s=timeout_s,
    )


def _refuse_wrong_addresses(database_url: str | None, stores: list[str]) -> None:
    from regional_agent.store.address import StoreAddress

    if database_url is not None and not database_url.startswith(("postgresql://", "postgres://")):
        fail("--database-url: it must look like postgresql://user:password@host:5432/leasehold")
    for each in stores:
        try:
            StoreAddress.parse(each)
        except ValueError as error:  # it does not repeat the address, which may have a password
            fail(f"--store-url: {error}")


def _examined(installation: "Installation", codes: list[str]) -> "list[CheckResult]":
    from leasehold.doctor.examine import Doctor

    with progress_line() as show:
        found = asyncio.run(Doctor(installation, show).examine())
    return [each for each in found if not codes or each.check in codes]


def _refuse_unknown(codes: list[str]) -> None:
    from leasehold.doctor.catalogue import all_checks

    known = {each.code for each in all_checks()}
    for code in codes:
        if code not in known:
            fail(f"there is no check {code!r}; `leasehold doctor --list` lists them")


def _counts(found: "list[CheckResult]") -> dict[str, int]:
    from protocol.diagnosis.checks import CheckState

    return {state.value: sum(each.state is state for each in found) for state in CheckState}


def _print(found: "list[CheckResult]", *, problems: bool, as_json: bool) -> None:
    import msgspec

    shown = [each for each in found if each.state.value != "ok"] if problems else found
    counts = _counts(found)
    if as_json:
        typer.echo(msgspec.json.encode({"counts": counts, "checks": shown}).decode())
        return
    rows = [[each.state.value, each.check, each.subject, each.found, each.remedy] for each in shown]
    if rows:
        print_table(["state", "check", "subject", "found", "what to do"], rows)
    typer.echo(", ".join(f"{count} {state}" for state, count in counts.items()))


def _print_list(*, as_json: bool) -> None:
    import msgspec

    from leasehold.doctor.catalogue import CATALOGUE

    rows = [(group, each.code, each.examines) for group, checks in CATALOGUE.items() for each in checks]
    if as_json:
        listed = [{"check": code, "about": group, "examines": examines} for group, code, examines in rows]
        typer.echo(msgspec.json.encode(listed).decode())
    else:
        print_table(["check", "about", "examines"], [[code, group, examines] for group, code, examines in rows])
