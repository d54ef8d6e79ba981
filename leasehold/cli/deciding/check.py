"""`leasehold check`: send a check to an agent, or let the agent explain it."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from leasehold.cli.api import answer, explained, pairs, verification
from leasehold.cli.environment import secret_of
from leasehold.cli.output import print_table, shown

if TYPE_CHECKING:
    import httpx

commands = typer.Typer()

AGENT_URL, AGENT_TOKEN = "LEASEHOLD_AGENT_URL", "LEASEHOLD_AGENT_SERVICE_TOKEN"
DEFAULT_AGENT_URL = "http://127.0.0.1:8411"
TIMEOUT_S = 60
LABEL = "labels."
EXAMPLE = "FIELD=VALUE, such as tenant=acme or labels.model=large"


@commands.command()
def check(
    subject: Annotated[
        list[str],
        typer.Argument(metavar="FIELD=VALUE...", help="The subject: tenant=acme route=/v1/chat labels.model=large."),
    ],
    cost: Annotated[int | None, typer.Option(min=1, help="Units.", show_default="what each policy says")] = None,
    peek: Annotated[bool, typer.Option("--peek", help="Decide, and consume nothing.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Tell which policies match, and why the others do not. Consumes nothing.")
    ] = False,
    agent: Annotated[str, typer.Option(envvar=AGENT_URL, help="The agent's URL.")] = DEFAULT_AGENT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the API's own object, for programs.")] = False,
) -> None:
    """Ask an agent whether a request may happen now, and consume its cost if it may.

    Exits with 0 if the request is allowed, with 1 if it is denied or the agent cannot be asked. If the agent needs a
    token, it is read from LEASEHOLD_AGENT_SERVICE_TOKEN.
    """
    body = {"subject": _subject(subject), "mode": "peek" if peek else "enforce"} | ({"cost": cost} if cost else {})
    response = _post(agent, "/v1/explain" if explain else "/v1/check", body)
    found = response.json() if _is_decision(response) else answer(response)
    if as_json:
        typer.echo(response.text)
    elif explain:
        _print_explanation(found)
    else:
        _print_decision(found)
    if not found.get("allowed", True):
        raise typer.Exit(1)


def _subject(given: list[str]) -> dict[str, Any]:
    named = pairs(given, EXAMPLE).items()
    subject: dict[str, Any] = {field: value for field, value in named if not field.startswith(LABEL)}
    labels = {field.removeprefix(LABEL): value for field, value in named if field.startswith(LABEL)}
    return subject | ({"labels": labels} if labels else {})


def _post(agent: str, path: str, body: dict[str, Any]) -> "httpx.Response":
    import httpx

    token = secret_of(AGENT_TOKEN)
    headers = {"Authorization": f"Bearer {token.split()[0]}"} if token else {}  # there may be several
    url = f"{agent.rstrip('/')}{path}"
    with explained(agent):
        return httpx.post(url, json=body, headers=headers, timeout=TIMEOUT_S, verify=verification())


def _is_decision(response: "httpx.Response") -> bool:
    """Return whether a response with an error status is a denial."""
    is_json = "json" in response.headers.get("Content-Type", "")
    return is_json and "allowed" in response.json()


def _print_decision(found: dict[str, Any]) -> None:
    typer.echo("allowed" if found["allowed"] else f"denied: {found['detail']}")
    columns = ("policy", "allowed", "limit", "remaining", "retry_after_ms", "reason")
    if found["policies"]:
        print_table(columns, [[_shown(each, name) for name in columns] for each in found["policies"]])
    elif found["allowed"]:
        typer.echo("no policy matches: `--explain` tells why")


def _shown(policy: dict[str, Any], name: str) -> str:
    is_unlimited = policy.get("unlimited") and name in ("limit", "remaining")
    return "unlimited" if is_unlimited else _text(policy[name])


def _print_explanation(found: dict[str, Any]) -> None:
    if found["blocked_by"] is not None:
        typer.echo(f"a block on its {found['blocked_by']} denies this request")
    if found["unmatched"] is not None:
        typer.echo(f"no enforced policy matches; unmatched: {found['unmatched']}")
    subject = " ".join(f"{field}={value}" for field, value in found["subject"].items())
    typer.echo(f"read as {subject}; route class {found['route_class']}, plan {found['plan'] or 'none'}")
    rows = sorted(found["policies"], key=lambda each: not each["matches"])
    print_table(
        ("policy", "matches", "because", "key"),
        [[each["policy"], _matches(each), _because(each), each["key"] or ""] for each in rows],
    )


def _matches(policy: dict[str, Any]) -> str:
    return ("in shadow" if policy["shadow"] else "yes") if policy["matches"] else "no"


def _because(policy: dict[str, Any]) -> str:
    unmet = [f"{each['condition']} is {_text(each['wanted'])}, not {each['found']}" for each in policy["unmet"]]
    return "; ".join([*unmet, *([policy["invalid"]] if policy["invalid"] and policy["matches"] else [])])


def _text(value: object) -> str:
    return "" if value is None else ", ".join(value) if isinstance(value, list) else shown(value)
