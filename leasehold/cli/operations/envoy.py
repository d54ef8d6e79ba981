"""`leasehold envoy`: the proxies that are connected to an agent by the quota protocol, and what each may admit."""

from typing import Annotated, Any

import typer

from leasehold.cli.api import answer, explained, verification
from leasehold.cli.deciding.check import AGENT_TOKEN, AGENT_URL, DEFAULT_AGENT_URL, TIMEOUT_S
from leasehold.cli.environment import secret_of
from leasehold.cli.output import print_table

commands = typer.Typer()


@commands.command()
def envoy(
    agent: Annotated[str, typer.Option(envvar=AGENT_URL, help="The agent's URL.")] = DEFAULT_AGENT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the API's own object, for programs.")] = False,
) -> None:
    """Show which proxies are connected to an agent by Envoy's quota protocol (RLQS), and what each may admit.

    If the agent needs a token, it is read from LEASEHOLD_AGENT_SERVICE_TOKEN. Exits with 1 if it cannot be asked.
    """
    import httpx

    token = secret_of(AGENT_TOKEN)
    headers = {"Authorization": f"Bearer {token.split()[0]}"} if token else {}  # there may be several
    with explained(agent):
        response = httpx.get(
            f"{agent.rstrip('/')}/v1/status", headers=headers, timeout=TIMEOUT_S, verify=verification()
        )
    found = answer(response)["proxy_quotas"]
    if as_json:
        import json

        typer.echo(json.dumps(found))
    elif found is None:
        typer.echo("the agent has no gRPC door: set LEASEHOLD_AGENT_GRPC_PORT")
    elif not found["proxies"]:
        typer.echo("no proxy is connected")
    else:
        _print_tables(found)


def _print_tables(found: dict[str, Any]) -> None:
    print_table(
        ("proxy", "domain", "connected", "last report", "buckets"),
        [
            [each["proxy"], each["domain"], _connected(each), _ago(each["reported_ms_ago"]), str(each["buckets"])]
            for each in found["proxies"]
        ],
    )
    print_table(
        ("proxy", "bucket", "may admit", "at once", "admitted", "denied", "because of"),
        [
            [
                each["proxy"],
                " ".join(f"{key}={value}" for key, value in each["bucket"].items()),
                _rate(each),
                str(each["tokens"] or ""),
                str(each["allowed"]),
                str(each["denied"]),
                ", ".join(each["quotas"]) or each["reason"],
            ]
            for each in found["assignments"]
        ],
    )
    if found["more_assignments"]:
        typer.echo(f"and {found['more_assignments']} more")


def _connected(proxy: dict[str, Any]) -> str:
    return _ago(proxy["age_ms"]) if proxy["connected"] else "no"


def _ago(ms: int) -> str:
    return f"{ms / 1000:.0f} s"


def _rate(assignment: dict[str, Any]) -> str:
    if assignment["rule"]:
        return {"allow": "everything", "deny": "nothing"}[assignment["rule"]]
    return f"{assignment['rate_milli'] / 1000:g}/s"
