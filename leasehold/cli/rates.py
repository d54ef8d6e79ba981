"""`leasehold rates`: who may use how much of what is shared by demand, and what that may come to beyond the limit."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leasehold.cli.coordinator_api import DEFAULT_URL, Json, Url, answer, asking, echo_json, every, given
from leasehold.cli.failure import fail
from leasehold.cli.live_tables import Block, Columns, Row, Watch, show_tables

if TYPE_CHECKING:
    import httpx

COLUMNS = Columns(
    ("region", "may use", "wants", "by weight", "heard"),
    left_out_first=("heard", "by weight", "wants"),
)
NOTHING = "no region speaks of any: each has its part by weight, and none has more"

Quota = Annotated[str | None, typer.Option(help="Only this one, by its name or its key: api:tenant=acme.")]
Tenant = Annotated[str | None, typer.Option(help="Only what is counted by this tenant.")]
Region = Annotated[str | None, typer.Option(help="Of each only this region.")]


def rates(
    quota: Quota = None,
    tenant: Tenant = None,
    region: Region = None,
    watch: Watch = False,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Show which part of each shared rate a region may use, and what may be admitted beyond the limit."""
    _show("rate", blocks_of_rates, given(quota=quota, tenant=tenant, region=region), url, as_json=as_json, watch=watch)


def slots(
    quota: Quota = None,
    tenant: Tenant = None,
    region: Region = None,
    watch: Watch = False,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Show how many of each quota's shared slots may be in use in a region."""
    asked = given(quota=quota, tenant=tenant, region=region)
    _show("concurrency", blocks_of_slots, asked, url, as_json=as_json, watch=watch)


def _show(
    kind: str,
    blocks_of: Callable[[Iterable[dict[str, Any]]], list[Block]],
    asked: dict[str, str],
    url: str,
    *,
    as_json: bool,
    watch: bool,
) -> None:
    path = f"/v1/{COMMANDS[kind]}"
    with asking(url, "quota:read") as client:
        _must_be_known(client, asked.get("quota"), kind)
        if as_json:
            echo_json(every(client, path, **asked))
        else:
            show_tables(lambda: blocks_of(every(client, path, **asked)), COLUMNS, NOTHING, watch=watch)


def _must_be_known(client: "httpx.Client", quota: str | None, kind: str) -> None:
    """A name that is misspelt must not look like one of which all is well."""
    if quota is None:
        return
    name = quota.partition(":")[0]
    kinds = {each["name"]: each["kind"] for each in answer(client.get("/v1/limits"))["document"]["quotas"]}
    if name not in kinds:
        fail(f"there is no quota {name!r}")
    if kinds[name] != kind:
        fail(f"{name!r} is no {kind}: it is of kind {kinds[name]}; look with `leasehold {COMMANDS[kinds[name]]}`")


COMMANDS = {"rate": "rates", "concurrency": "slots", "allowance": "allocations"}


def blocks_of_rates(rows: Iterable[dict[str, Any]]) -> list[Block]:
    """A line for each key, and under it its regions, in units a second."""
    now = datetime.now(UTC)
    return [Block(_of_rate(each), [_region_rate(region, now) for region in each["regions"]]) for each in rows]


def _of_rate(each: dict[str, Any]) -> str:
    most, so_far = _units(each["bound_milli"], 1000), _units(each["overshoot_milli"], 1000)
    beyond = f"beyond it at most {most} units, so far at most {so_far}" if each["bound_milli"] else "never beyond it"
    return f"{each['quota']} {_per_second(each['limit_micro'])}, {each['sharing']}: {beyond}"


def _region_rate(each: dict[str, Any], now: datetime) -> Row:
    return {
        "region": each["region"],
        "may use": _per_second(each["most_micro"]),
        "wants": _per_second(each["demand_micro"]),
        "by weight": _per_second(each["safe_micro"]),
        "heard": _heard(each["last_seen_at"], now),
    }


def blocks_of_slots(rows: Iterable[dict[str, Any]]) -> list[Block]:
    now = datetime.now(UTC)
    return [
        Block(
            f"{each['quota']} {each['limit']} at once, for {each['slot_ttl_ms'] / 1000:g} s at most",
            [_region_slots(region, now) for region in each["regions"]],
        )
        for each in rows
    ]


def _region_slots(each: dict[str, Any], now: datetime) -> Row:
    return {
        "region": each["region"],
        "may use": str(each["most"]),
        "wants": "" if each["wanted"] is None else str(each["wanted"]),
        "by weight": str(each["safe"]),
        "heard": _heard(each["last_seen_at"], now),
    }


def _per_second(micro: int | None) -> str:
    return "" if micro is None else f"{_units(micro, 1_000_000)}/s"


def _units(parts: int, in_one: int) -> str:
    return f"{parts / in_one:.3f}".rstrip("0").rstrip(".")


def _heard(last_seen_at: str | None, now: datetime) -> str:
    if last_seen_at is None:
        return "not yet"
    return f"{max(0, (now - datetime.fromisoformat(last_seen_at)).total_seconds()):.0f} s ago"
