"""`leasehold quota`: what is limited, as the document in force says."""

from typing import Annotated, Any

import typer

from leasehold.cli.coordinator_api import DEFAULT_URL, Json, Url, answer, asking, echo_json, show
from leasehold.cli.failure import fail

quota = typer.Typer(no_args_is_help=True, help="Look at quotas and the policies that use them; export the document.")
ALWAYS = ("name", "kind", "limit")
KINDS = {
    "allowance": ("period", "time_zone", "cap", "mode", "horizon", "durability"),
    "rate": ("algorithm", "sharing", "slices"),
    "concurrency": ("slot_ttl",),
}


@quota.command(name="list")
def list_(as_json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List the quotas, their limits, and by how many policies each is used."""
    document = _document(url)
    if as_json:
        echo_json(document["quotas"])
        return
    used = [policy["quota"] for policy in document["policies"]]
    rows = [
        [each["name"], each["kind"], _limit(each), each["period"] or "", str(used.count(each["name"]))]
        for each in document["quotas"]
    ]
    show(["quota", "kind", "limit", "period", "policies"], rows)


@quota.command(name="show")
def show_(
    name: Annotated[str, typer.Argument(help="The quota's name.")], as_json: Json = False, url: Url = DEFAULT_URL
) -> None:
    """Show one quota, and the policies that use it."""
    document = _document(url)
    found = next((each for each in document["quotas"] if each["name"] == name), None)
    if found is None:
        fail(f"there is no quota {name!r}")
    policies = [policy for policy in document["policies"] if policy["quota"] == name]
    if as_json:
        echo_json({"quota": found, "policies": policies})
        return
    known = (*ALWAYS, *KINDS[found["kind"]])
    show(["", ""], [[field, _limit(found) if field == "limit" else str(found.get(field))] for field in known])
    show(
        ["policy", "route", "by", "cost", "store failure"],
        [
            [each["name"], _where(each), ", ".join(each["by"]) or "all", str(each["cost"]), each["on_store_failure"]]
            for each in policies
        ],
    )


@quota.command()
def export(url: Url = DEFAULT_URL) -> None:
    """Print the whole document in force as YAML; `leasehold apply` takes it back as it is."""
    with asking(url, "quota:read") as client:
        response = client.get("/v1/limits", headers={"Accept": "application/yaml"})
        if not response.is_success:
            answer(response)
        typer.echo(response.text, nl=False)


def _document(url: str) -> dict[str, Any]:
    with asking(url, "quota:read") as client:
        return dict(answer(client.get("/v1/limits"))["document"])


def _limit(each: dict[str, Any]) -> str:
    limit = each["limit"]
    return ", ".join(f"{plan}: {value}" for plan, value in limit.items()) if isinstance(limit, dict) else str(limit)


def _where(policy: dict[str, Any]) -> str:
    match = policy["match"]
    method = match["method"] if isinstance(match["method"], str) else "|".join(match["method"])
    rest = [f"{name} {match[name]}" for name in ("route_class", "ip") if match.get(name)]
    return " ".join([*([] if method == "*" else [method]), match["route"], *rest])
