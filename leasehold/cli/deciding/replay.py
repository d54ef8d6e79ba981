"""What a limits document would deny of recent traffic, as sentences and a table."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from leasehold.cli.api import Cli, Column
from leasehold.cli.output import fail, progress_line, warn
from protocol.limits.rates import parse_duration_ms

MOST_SENTENCES = 20
DEFAULT_TIME = "24h"
Last = Annotated[str, typer.Option("--against-traffic", help="How long back, such as 24h or 30m.")]
OnlyTenant = Annotated[str | None, typer.Option("--tenant", help="Only this tenant's checks: more can be read.")]

REASONS = {
    "concurrency": "how long holds lasted is not logged",
    "hashed_addresses": "the log has hashes of addresses, in which no network is found (`keys: plain` keeps them)",
    "missing_field": "the policy reads a field that these checks did not have, or that is no address: they would fail",
    "partial_period": "the period of the allowance began before, and its usage then is not in the log",
    "too_few_samples": "too few were logged for each quota key: raise `decisions`, and wait",
    "inactive_region": "their region has no share of the limit now",
}


def query_of(last: str, tenant: str | None) -> dict[str, str]:
    """Return the parameters of a replay of the last so many minutes, hours or days."""
    try:
        length = timedelta(milliseconds=parse_duration_ms(last))
    except ValueError as error:
        fail(f"--against-traffic: {error}")
    start = (datetime.now(UTC) - length).isoformat()
    return {"from": start} | ({} if tenant is None else {"tenant": tenant})


def replay(cli: Cli, path: str, last: str, tenant: str | None, content: bytes = b"", media_type: str = "") -> Any:
    """Ask for a replay. It may take half a minute."""
    from leasehold.cli.api import answer

    headers = {"Content-Type": media_type} if media_type else {}
    with progress_line() as say:
        say(f"replaying the checks of the last {last}")
        return answer(
            cli.client.post(path, params=query_of(last, tenant), content=content, headers=headers, timeout=90)
        )


def print_replay(cli: Cli, found: dict[str, Any]) -> None:
    rows = [{"tenant": each["tenant"], **policy} for each in found["tenants"] for policy in each["policies"]]
    if rows:
        cli.render(rows, _COLUMNS)
    for sentence in sentences_of(found):
        typer.echo(sentence)
    if found["more_tenants"]:
        warn(f"{found['more_tenants']} more tenants are not shown; name one with --tenant")


def sentences_of(found: dict[str, Any]) -> list[str]:
    """Return what a replay found, by tenant, and what it cannot say."""
    said = [_tenant_sentence(each) for each in found["tenants"][:MOST_SENTENCES]]
    if not said:
        said.append("The decision log has no checks of this time.")
    if found["covered_from"] > found["start"]:
        said.append(f"Only checks from {found['covered_from']} on are counted: there are more than one replay reads.")
    if found["lost"]:
        said.append(f"{found['lost']:,} decisions of this time, of any tenant, were lost: they are not counted.")
    if found["not_logged"]:
        named = ", ".join("all others" if name == "*" else name for name in found["not_logged"])
        said.append(f"Admissions by these policies were not logged (0%), so parts are too high: {named}.")
    policies = [policy for each in found["tenants"] for policy in each["policies"]]
    for reason in dict.fromkeys(each["reason"] for policy in policies for each in policy["unknown"]):
        named = ", ".join(sorted({policy["policy"] for policy in policies if _unknown(policy, reason)}))
        number = sum(_unknown(policy, reason) for policy in policies)
        said.append(f"Nothing is said of {number:,} checks of {named}: {REASONS.get(reason, reason)}.")
    return said


def _unknown(policy: dict[str, Any], reason: str) -> int:
    return sum(each["checks"] for each in policy["unknown"] if each["reason"] == reason)


def _tenant_sentence(tenant: dict[str, Any]) -> str:
    whose = "checks without a tenant" if tenant["tenant"] is None else f"{tenant['tenant']}'s checks"
    about = f"{tenant['checks']:,}" + (f" (± {tenant['plus_minus']:,})" if tenant["plus_minus"] else "")
    was = tenant["denied"] / tenant["checks"] if tenant["checks"] else 0.0
    return f"Of {about} {whose} at least {_share(tenant['would_deny'])} would be denied; {_percent(was)} were."


def _share(denials: dict[str, Any]) -> str:
    if denials["share_low"] == denials["share_high"]:
        return _percent(denials["share"])
    return f"{_percent(denials['share'])} ({_percent(denials['share_low'])} to {_percent(denials['share_high'])})"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _window(policy: dict[str, Any]) -> str | None:
    return str(timedelta(seconds=policy["window_s"])) if policy["window_s"] > 1 else None


_COLUMNS: dict[str, Column] = {
    "tenant": "tenant",
    "policy": lambda each: f"{each['policy']} (shadow)" if each["shadow"] else each["policy"],
    "checks": lambda each: f"{each['checks']:,}",
    "denied": lambda each: f"{each['denied']:,}",
    "would be denied, at least": lambda each: f"{each['would_deny']['checks']:,}",
    "share": lambda each: _share(each["would_deny"]),
    "unknown": lambda each: f"{sum(one['checks'] for one in each['unknown']):,}" if each["unknown"] else None,
    "counted in windows of": _window,
}
