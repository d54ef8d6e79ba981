"""Push sealed usage into an invoicing system, each unit once, even if this program is killed and started again.

    python examples/push_usage.py http://127.0.0.1:8400 https://api.stripe.com --as stripe

with the tokens LEASEHOLD_TOKEN and INVOICING_TOKEN in the environment. It asks for one step of the ledger at a time
(`GET /v1/usage/changes`), sends each change with the change's own id as the idempotency key, and writes the next
position down when the whole step is sent. A step that was begun is sent again with the same ids, and the invoicing
system ignores what it has. Each `--as` is a shape of the same event. A tenant's id in the invoicing system is
registered with `leasehold tenant set`; without one the tenant itself is the id.
"""

import argparse
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

Change = dict[str, Any]
DUPLICATE = ("already exists", "already_exist", "already been")  # how invoicing systems say that they have it


def changes_of_step(leasehold: httpx.Client, since: int) -> tuple[list[Change], int]:
    """Return all changes of the step that begins at `since`, and where the next one begins."""
    changes: list[Change] = []
    params: dict[str, Any] = {"since": since}
    while True:
        page = leasehold.get("/v1/usage/changes", params=params).raise_for_status().json()
        changes += page["data"]
        if page["page"]["next"] is None:
            return changes, page["next_since"]
        params["page_after"] = page["page"]["next"]


def customer_ids(leasehold: httpx.Client, system: str) -> dict[str, str]:
    """Return the ids that tenants have in the invoicing system."""
    ids: dict[str, str] = {}
    params: dict[str, Any] = {}
    while True:
        page = leasehold.get("/v1/tenants", params=params).raise_for_status().json()
        ids |= {each["tenant"]: each["external_ids"][system] for each in page["data"] if system in each["external_ids"]}
        if page["page"]["next"] is None:
            return ids
        params["page_after"] = page["page"]["next"]


def seconds_of(change: Change) -> int:
    """Return when it was used. What is not usage, such as a write-off, happens now."""
    return int(datetime.fromisoformat(change["hour"]).timestamp()) if change["hour"] else int(time.time())


def stripe(change: Change, customer: str) -> tuple[str, dict[str, Any]]:
    payload = {"payload[stripe_customer_id]": customer, "payload[value]": str(change["units"])}
    form = {"event_name": change["quota"], "identifier": change["id"], "timestamp": str(seconds_of(change)), **payload}
    return "/v1/billing/meter_events", {"data": form}


def lago(change: Change, customer: str) -> tuple[str, dict[str, Any]]:
    event = {
        "transaction_id": change["id"],
        "external_subscription_id": customer,
        "code": change["quota"],
        "timestamp": seconds_of(change),
        "properties": {"units": change["units"], "kind": change["kind"], "period": change["period"]},
    }
    return "/api/v1/events", {"json": {"event": event}}


def cloudevents(change: Change, customer: str) -> tuple[str, dict[str, Any]]:
    event = {
        "specversion": "1.0",
        "id": change["id"],
        "source": "leasehold",
        "type": "leasehold.usage",
        "subject": customer,
        "datacontenttype": "application/json",
        "data": change,
    }
    return "/events", {"json": event, "headers": {"Content-Type": "application/cloudevents+json"}}


SHAPES = {"stripe": stripe, "lago": lago, "cloudevents": cloudevents}


def send(invoicing: httpx.Client, path: str, request: dict[str, Any]) -> None:
    """Send one event. An answer that it is there already is a success."""
    answer = invoicing.post(path, **request)
    if not (answer.status_code in (400, 409, 422) and any(word in answer.text for word in DUPLICATE)):
        answer.raise_for_status()


def write_position(file: Path, position: int) -> None:
    """Replace the file at once, so that it is never half written."""
    new = file.with_name(f"{file.name}.new")
    with new.open("w") as written:
        written.write(str(position))
        written.flush()
        os.fsync(written.fileno())
    new.replace(file)


def push_steps(leasehold: httpx.Client, invoicing: httpx.Client, shape: str, file: Path) -> Iterator[int]:
    """Send step after step up to the newest seal. Yield each position that was reached."""
    since = int(file.read_text()) if file.exists() else 0
    while True:
        changes, position = changes_of_step(leasehold, since)
        if position == since:
            return
        ids = customer_ids(leasehold, shape) if changes else {}
        for change in changes:
            tenant: str = change["tenant"]
            path, request = SHAPES[shape](change, ids.get(tenant, tenant))
            send(invoicing, path, request)
        write_position(file, position)
        since = position
        yield position


def main() -> None:
    parser = argparse.ArgumentParser(description="Push sealed usage into an invoicing system.")
    parser.add_argument("leasehold")
    parser.add_argument("invoicing")
    parser.add_argument("--as", dest="shape", choices=SHAPES, default="stripe")
    parser.add_argument("--position", type=Path, default=Path("pushed-position"), help="where the position is kept")
    given = parser.parse_args()
    tokens = [{"Authorization": f"Bearer {os.environ[name]}"} for name in ("LEASEHOLD_TOKEN", "INVOICING_TOKEN")]
    with (
        httpx.Client(base_url=given.leasehold, headers=tokens[0], timeout=30) as leasehold,
        httpx.Client(base_url=given.invoicing, headers=tokens[1], timeout=30) as invoicing,
    ):
        for position in push_steps(leasehold, invoicing, given.shape, given.position):
            print(f"pushed up to position {position}")


if __name__ == "__main__":
    main()
