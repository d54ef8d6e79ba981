"""`leasehold envoy`: who is connected to an agent's gRPC door, and what each proxy may admit by the quota protocol."""

from typing import Annotated, Any

import typer

from leasehold.cli.api import answer, explained, verification
from leasehold.cli.deciding.check import AGENT_TOKEN, AGENT_URL, DEFAULT_AGENT_URL, TIMEOUT_S
from leasehold.cli.environment import secret_of
from leasehold.cli.output import print_table

commands = typer.Typer()

PARTS = ("grpc_clients", "more_grpc_clients", "silent_workers", "proxy_quotas")  # of the status


@commands.command()
def envoy(
    agent: Annotated[str, typer.Option(envvar=AGENT_URL, help="The agent's URL.")] = DEFAULT_AGENT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the API's own object, for programs.")] = False,
) -> None:
    """Show who is connected to an agent's gRPC door, and what each proxy may admit by Envoy's quota protocol (RLQS).

    If the agent needs a token, it is read from LEASEHOLD_AGENT_SERVICE_TOKEN. Exits with 1 if it cannot be asked.
    """
    import httpx

    token = secret_of(AGENT_TOKEN)
    headers = {"Authorization": f"Bearer {token.split()[0]}"} if token else {}  # there may be several
    with explained(agent):
        response = httpx.get(
            f"{agent.rstrip('/')}/v1/status", headers=headers, timeout=TIMEOUT_S, verify=verification()
        )
    status = answer(response)
    found = status["proxy_quotas"]
    if as_json:
        import json

        typer.echo(json.dumps({name: status[name] for name in PARTS}))
        return
    if found is None:
        typer.echo("the agent has no gRPC door: set LEASEHOLD_AGENT_GRPC_PORT")
        return
    if status["silent_workers"]:
        typer.echo(f"{status['silent_workers']} workers did not answer: their clients and proxies are missing")
    print_connections(status)
    if found["proxies"]:
        _print_tables(found)
    else:
        typer.echo("no proxy is connected by the quota protocol")


def print_connections(status: dict[str, Any]) -> None:
    """Print the connections, of RLS and RLQS alike: a proxy has one for each of its threads."""
    if not status["grpc_clients"]:
        typer.echo("no client is connected")
        return
    rows = [
        [each["address"], _ago(each["connected_ms"]), str(each["calls"]), str(each["streams"])]
        for each in status["grpc_clients"]
    ]
    print_table(("connection", "connected", "calls", "under way"), rows)
    if status["more_grpc_clients"]:
        typer.echo(f"and {status['more_grpc_clients']} more")


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
