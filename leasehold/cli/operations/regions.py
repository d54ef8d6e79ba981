"""`leasehold region`, `allocations`, `rates` and `slots`: the regions, and what each of them holds or may use."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from leasehold.cli.api import Cli, Column, api_command, fields, segment
from leasehold.cli.output import Columns, Row, Section, Watch, fail, print_sections
from protocol.counting import counted

commands = typer.Typer()
region = typer.Typer(no_args_is_help=True, help="Look at the regions, add one, or change its weight.")

SILENT_AFTER = timedelta(minutes=2)  # an idle agent polls within a minute
RegionName = Annotated[str, typer.Argument(metavar="REGION")]
Tenant = Annotated[str | None, typer.Option(help="Only what is counted by this tenant.")]
Region = Annotated[str | None, typer.Option(help="Only this region.")]


# --- regions ----------------------------------------------------------------------------------------------------------


@api_command(region, scope="quota:read", name="list")
def list_regions(cli: Cli) -> None:
    """List the regions: weight, status, current epoch, and the time of the last exchange."""
    cli.render(cli.get_all("/v1/regions"), REGION)


@api_command(region, scope="quota:read", name="show")
def show_region(cli: Cli, name: RegionName) -> None:
    """Show one region: when it was last heard, its stores, lanes, agents and releases.

    Example: leasehold region show us-east
    """
    found = cli.get(f"/v1/regions/{segment(name)}")
    if cli.as_json:
        cli.print_json(found)
        return
    now = datetime.now(UTC)
    rows = {
        "region": found["name"],
        "status": found["status"],
        "weight": found["weight"],
        "last heard": f"{found['last_seen_at']} ({_age(found['last_seen_at'], now)})"
        if found["last_seen_at"]
        else "never",
        "epoch": found["epoch"],
        "faults": _faults(found),
        "created": found["created_at"],
        **{name.replace("_", " "): _shown(found[name]) for name in found.keys() - SHOWN_BY_NAME},
    }
    cli.render([{"": name, " ": value} for name, value in rows.items() if value], fields("", " "))
    if agents := found.get("agents"):
        cli.render(
            agents, AGENT | {"last heard": lambda each: f"{each['last_seen_at']} ({_age(each['last_seen_at'], now)})"}
        )


SHOWN_BY_NAME = frozenset(
    {"name", "status", "weight", "last_seen_at", "epoch", "split_brain", "regressed_lanes", "created_at", "agents"}
)
AGENT: dict[str, Column] = {
    "agent": "name",
    "release": "release",
    "capabilities": lambda each: ", ".join(each["capabilities"]),
}


def _shown(value: object) -> str:
    """Print what a coordinator of another release may tell: a list or an object in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    return ", ".join(map(_shown, value)) if isinstance(value, list) else str(value or "")


@api_command(region, scope="alloc:write", name="put", changes=True)
def put_region(
    cli: Cli,
    name: RegionName,
    weight: Annotated[int | None, typer.Option(help="Its part of every quota, relative to the other regions'.")] = None,
) -> None:
    """Add a region, or change its weight."""
    cli.render(cli.put(f"/v1/regions/{segment(name)}", {"weight": weight}), REGION)


@api_command(region, scope="admin", name="identities", changes=True)
def put_identities(
    cli: Cli,
    name: RegionName,
    identities: Annotated[
        list[str] | None, typer.Argument(metavar="[IDENTITY...]", help="URIs or host names in client certificates.")
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Remove all identities of the region.")] = False,
) -> None:
    """Set which client certificates agents of a region may show instead of a token. Others are removed.

    Example: leasehold region identities us-east spiffe://example.org/leasehold/us-east
    """
    if bool(identities) == none:
        fail("name the identities of the region, or --none")
    found = cli.put(f"/v1/regions/{segment(name)}/identities", {"identities": identities or []})
    cli.render([{"identity": each} for each in found["identities"]], fields("identity"))


def _faults(region: dict[str, Any]) -> str:
    faults = ["two stores answer under its name"] if region["split_brain"] else []
    faults += [f"{counted(region['regressed_lanes'], 'lane')} ahead of the ledger"] if region["regressed_lanes"] else []
    return ", ".join(faults)


REGION: dict[str, Column] = {
    "region": "name",
    "weight": "weight",
    "status": "status",
    "epoch": lambda each: str(each["epoch"] or ""),
    "last seen": lambda each: each.get("last_seen_at") or "never",
    "agents": lambda each: agents_of(each.get("agents", ()), each.get("last_seen_at")),
    "faults": _faults,
}


def agents_of(agents: Sequence[dict[str, Any]], region_seen_at: str | None) -> str:
    """Return how many agents there are of each release, without those that were silent when the region was not.

    An agent that has stopped is listed for a day, and would be counted beside the one in its place.
    """
    newest = (
        datetime.fromisoformat(region_seen_at) if region_seen_at else datetime.min.replace(tzinfo=UTC) + SILENT_AFTER
    )
    live = [each for each in agents if datetime.fromisoformat(each["last_seen_at"]) >= newest - SILENT_AFTER]
    counts = Counter(agent["release"] for agent in live)
    return ", ".join(f"{count} of {release}" for release, count in sorted(counts.items()))


# --- allowances -------------------------------------------------------------------------------------------------------

ALLOCATION_COLUMNS = Columns(
    ("region", "state", "holds", "used", "demand/s", "dry in", "incoming", "suspense", "set"),
    left_out_first=("state", "used", "set", "suspense", "incoming", "demand/s"),
)
NO_ALLOCATIONS = "no region holds any"


@api_command(commands, scope="quota:read")
def allocations(
    cli: Cli,
    quota: Annotated[
        str | None, typer.Option(help="Only this allowance, by its name or its key: exports:tenant=acme.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only allowances of this tenant.")] = None,
    region: Annotated[str | None, typer.Option(help="Only what this region holds.")] = None,
    period: Annotated[
        str | None, typer.Option(help="A period, such as 2026-10.", show_default="the current periods")
    ] = None,
    watch: Watch = False,
) -> None:
    """Show how many units of each allowance every region holds, as the regions last reported it."""

    def read() -> list[dict[str, Any]]:
        return cli.get_all("/v1/allocations", quota=quota, tenant=tenant, region=region, period=period)

    if cli.as_json:
        cli.print_json(read())
    else:
        print_sections(lambda: allocation_sections(read()), ALLOCATION_COLUMNS, NO_ALLOCATIONS, watch=watch)


def allocation_sections(pools: list[dict[str, Any]]) -> list[Section]:
    """Return a section for each allowance, with a row for what no region holds and one for each region."""
    now = datetime.now(UTC)
    return [
        Section(
            f"{each['quota']} {each['period']}",
            [_unallocated(each), *(_allocation(region, now) for region in each["regions"])],
        )
        for each in pools
    ]


def _unallocated(pool: dict[str, Any]) -> Row:
    return {
        "region": f"(unallocated, of {pool['funded']})" + ("" if pool["mode"] == "leased" else f" {pool['mode']}"),
        "state": pool["state"],
        "holds": str(pool["unallocated"]),
        "used": str(pool["consumed"]),
        "incoming": _unless_0(pool["in_transit"]),
        "suspense": _unless_0(pool["suspense"]),
    }


def _allocation(region: dict[str, Any], now: datetime) -> Row:
    return {
        "region": region["region"],
        "state": region["state"],
        "holds": str(region["outstanding"]),
        "used": str(region["consumed"]),
        "demand/s": f"{region['demand_milli'] / 1000:g}" if region["demand_milli"] else "",
        "dry in": _time_left(region["dry_at"], now),
        "incoming": _unless_0(region["incoming"]),
        "suspense": _unless_0(region["suspense"]),
        "set": _settings(region),
    }


def _time_left(dry_at: str | None, now: datetime) -> str:
    if dry_at is None:
        return ""
    seconds = (datetime.fromisoformat(dry_at) - now).total_seconds()
    return "now" if seconds <= 0 else f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _settings(region: dict[str, Any]) -> str:
    floor, ceiling = region["floor"], region["ceiling"]
    if floor is not None and floor == ceiling:
        return f"weight {region['weight']}, pin {floor}"
    hold, until = region.get("hold"), region.get("hold_until")
    held = None if hold is None else f"{hold} until {until}"
    settings = [
        ("weight", region["weight"]),
        ("floor", floor),
        ("ceiling", ceiling),
        ("hold", held),
        ("limit", region["limit"]),
    ]
    return ", ".join(f"{name} {value}" for name, value in settings if value is not None)


def _unless_0(units: int) -> str:
    return str(units) if units else ""


# --- rates and slots --------------------------------------------------------------------------------------------------

SHARE_COLUMNS = Columns(
    ("region", "may use", "demand", "base share", "last report"),
    left_out_first=("last report", "base share", "demand"),
)
NO_SHARES = "no region has reported demand: each may use its share by weight"
COMMANDS = {"rate": "rates", "concurrency": "slots", "allowance": "allocations"}

SharedQuota = Annotated[str | None, typer.Option(help="Only this quota, by its name or its key: api:tenant=acme.")]


@api_command(commands, scope="quota:read")
def rates(
    cli: Cli, quota: SharedQuota = None, tenant: Tenant = None, region: Region = None, watch: Watch = False
) -> None:
    """Show the share of each rate that a region may use, and how much may be admitted above the limit."""
    _print_shares(cli, "rate", rate_sections, watch=watch, quota=quota, tenant=tenant, region=region)


@api_command(commands, scope="quota:read")
def slots(
    cli: Cli, quota: SharedQuota = None, tenant: Tenant = None, region: Region = None, watch: Watch = False
) -> None:
    """Show how many of each quota's shared slots may be in use in a region."""
    _print_shares(cli, "concurrency", slot_sections, watch=watch, quota=quota, tenant=tenant, region=region)


def _print_shares(
    cli: Cli,
    kind: str,
    sections: Callable[[Iterable[dict[str, Any]]], list[Section]],
    *,
    watch: bool,
    **params: str | None,
) -> None:
    _require_quota(cli, params["quota"], kind)

    def read() -> list[dict[str, Any]]:
        return cli.get_all(f"/v1/{COMMANDS[kind]}", **params)

    if cli.as_json:
        cli.print_json(read())
    else:
        print_sections(lambda: sections(read()), SHARE_COLUMNS, NO_SHARES, watch=watch)


def _require_quota(cli: Cli, quota: str | None, kind: str) -> None:
    """End the command for a quota that does not exist or is of another kind: an empty table would hide the mistake."""
    if quota is None:
        return
    name = quota.partition(":")[0]
    kinds = {each["name"]: each["kind"] for each in cli.get("/v1/limits")["document"]["quotas"]}
    if name not in kinds:
        fail(f"there is no quota {name!r}")
    if kinds[name] != kind:
        fail(f"{name!r} is not a {kind} but of kind {kinds[name]}: use `leasehold {COMMANDS[kinds[name]]}`")


def rate_sections(rows: Iterable[dict[str, Any]]) -> list[Section]:
    """Return a section for each key, in units a second."""
    now = datetime.now(UTC)
    return [Section(_rate(each), [_rate_share(region, now) for region in each["regions"]]) for each in rows]


def _rate(each: dict[str, Any]) -> str:
    most, so_far = _units(each["bound_milli"], 1000), _units(each["overshoot_milli"], 1000)
    excess = f"at most {most} units above it, so far at most {so_far}" if each["bound_milli"] else "never above it"
    return f"{each['quota']} {_per_second(each['limit_micro'])}, {each['sharing']}: {excess}"


def _rate_share(each: dict[str, Any], now: datetime) -> Row:
    return {
        "region": each["region"],
        "may use": _per_second(each["most_micro"]),
        "demand": _per_second(each["demand_micro"]),
        "base share": _per_second(each["base_share_micro"]),
        "last report": _age(each["last_seen_at"], now),
    }


def slot_sections(rows: Iterable[dict[str, Any]]) -> list[Section]:
    now = datetime.now(UTC)
    return [
        Section(
            f"{each['quota']} {each['limit']} at once, for {each['slot_ttl_ms'] / 1000:g} s at most",
            [_slot_share(region, now) for region in each["regions"]],
        )
        for each in rows
    ]


def _slot_share(each: dict[str, Any], now: datetime) -> Row:
    return {
        "region": each["region"],
        "may use": str(each["most"]),
        "demand": "" if each["wanted"] is None else str(each["wanted"]),
        "base share": str(each["base_share"]),
        "last report": _age(each["last_seen_at"], now),
    }


def _per_second(micro: int | None) -> str:
    return "" if micro is None else f"{_units(micro, 1_000_000)}/s"


def _units(amount: int, in_one: int) -> str:
    return f"{amount / in_one:.3f}".rstrip("0").rstrip(".")


def _age(last_seen_at: str | None, now: datetime) -> str:
    if last_seen_at is None:
        return "not yet"
    seconds = max(0, (now - datetime.fromisoformat(last_seen_at)).total_seconds())
    return f"{seconds:.0f} s ago" if seconds < 600 else f"{seconds / 60:.0f} min ago"
