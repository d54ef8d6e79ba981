"""Changes of usage add up to the statements, and a worker that is killed pushes each once."""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import httpx
import pytest
from fastapi import FastAPI

from coordinator.access.issue_token import issue_token
from coordinator.proof.seal import seal_and_announce
from tests.budget import cases
from tests.integration.coordinator.admin_harness import AdminHarness, Region, Used, problem, sealed
from tests.integration.coordinator.fixtures import put_off, served
from tests.integration.coordinator.usage.test_statements import DAY, MAILS, at, charge, close, region, report_late

__all__ = ["region"]
pytestmark = pytest.mark.anyio
PROGRAM = Path(__file__).parents[4] / "examples" / "push_usage.py"
KILLER = Path(__file__).parent / "kill_worker.py"


async def steps(finance: httpx.AsyncClient, since: int = 0, page_size: int = 1) -> tuple[list[dict[str, Any]], int]:
    """Return all changes since a position, and where they end."""
    changes: list[dict[str, Any]] = []
    after = ""
    while True:
        path = f"/v1/usage/changes?since={since}&page_size={page_size}{after}"
        answer = await finance.get(path)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        changes += found["data"]
        after = f"&page_after={found['page']['next']}" if found["page"]["next"] else ""
        if not after:
            if found["next_since"] == since:
                return changes, since
            since = found["next_since"]


async def billed(finance: httpx.AsyncClient, as_of: int) -> dict[tuple[str, str], int]:
    rows = [
        row
        for period in (await finance.get("/v1/periods")).json()["data"]
        for row in (await finance.get(f"/v1/periods/{period['id']}/statements?as_of={as_of}")).json()["data"]
    ]
    return {(row["period"], row["tenant"]): row["billed"] for row in rows}


def summed(changes: list[dict[str, Any]]) -> dict[tuple[str, str], int]:
    sums: dict[tuple[str, str], int] = {}
    for each in changes:
        key = each["period"], each["tenant"]
        sums[key] = sums.get(key, 0) + each["units"]
    return sums


async def test_changes_of_all_kinds_add_up_to_the_statements(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    """This includes an estimate, late usage that replaces it, and a write-off."""
    await put_off(admin_harness.owner, "seal")
    await charge(admin_harness, region)
    await region.exchange("exports:tenant=acme")
    await sealed(admin_harness)
    await close(admin_harness)
    await report_late(region)
    one, other = await admin_harness.caller("adjust:propose"), await admin_harness.caller("adjust:approve")
    body = {"quota": MAILS, "period": DAY, "kind": "write_off", "units": 2, "reason": "r", "document": "d"}
    proposed = (await one.post("/v1/adjustments", json=body)).json()
    assert (await other.post(f"/v1/adjustments/{proposed['id']}:approve")).status_code == 200
    await region.exchange("exports:tenant=acme")
    await sealed(admin_harness)
    changes, end = await steps(finance)
    assert summed(changes) == await billed(finance, end)
    assert {each["kind"] for each in changes} == {"usage", "estimated", "late_usage", "replaced", "write_off"}
    assert len({each["id"] for each in changes}) == len(changes)
    middle = (await finance.get("/v1/usage/changes?since=0")).json()["next_since"]
    assert summed(
        [*(await finance.get("/v1/usage/changes?since=0")).json()["data"], *(await steps(finance, middle))[0]]
    ) == summed(changes)


async def test_a_step_stays_as_it_is(admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region) -> None:
    first = (await finance.get("/v1/usage/changes?since=0")).json()
    newest = (await finance.get("/v1/seals/latest")).json()
    assert first["next_since"] <= newest["position"]
    await region.use(MAILS, DAY, [Used(at("18T12:05"), 1, "mail")])
    await sealed(admin_harness)
    assert (await finance.get("/v1/usage/changes?since=0")).json() == first
    assert problem(await finance.get("/v1/usage/changes?since=9999")) == (422, [("since", "sealed")])
    assert problem(await finance.get("/v1/usage/changes")) == (422, [("since", "required")])


async def test_a_seal_with_reports_is_announced(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region
) -> None:
    await put_off(admin_harness.owner, "seal", "deliver_webhooks")
    await admin.post("/v1/webhooks", json={"url": "http://127.0.0.1:9/", "events": ["usage.sealed"]})
    for use in (True, False):
        if use:
            await region.use(MAILS, DAY, [Used(at("18T12:05"), 1, "mail")])
        admin_harness.clock.move(minutes=1)
        async with admin_harness.owner.transaction():
            await seal_and_announce(admin_harness.owner, admin_harness.clock.now())
    (data,) = [row["data"] for row in await admin_harness.owner.fetch("SELECT data FROM outbox")]
    newest = await admin_harness.owner.fetchval("SELECT max(position) FROM report")
    assert json.loads(data)["position"] == newest


# --- the worker -------------------------------------------------------------------------------------------------------


class Invoicing:
    """A small invoicing system that knows an event by its key, as Stripe and Lago do, and adds up what they owe."""

    def __init__(self) -> None:
        self.owed: dict[str, int] = {}
        self.keys = set[str]()
        self.refused = 0

    def take(self, path: str, body: bytes) -> tuple[int, str]:
        if path == "/v1/billing/meter_events":
            form = dict(parse_qsl(body.decode()))
            event = form["identifier"], form["payload[stripe_customer_id]"], int(form["payload[value]"])
            refusal = 400, "An event already exists with this identifier."
        elif path == "/api/v1/events":
            sent = json.loads(body)["event"]
            event = sent["transaction_id"], sent["external_subscription_id"], sent["properties"]["units"]
            refusal = 422, '{"error_details": {"transaction_id": ["value_already_exist"]}}'
        else:
            sent = json.loads(body)
            event = sent["id"], sent["subject"], sent["data"]["units"]
            refusal = 409, "it has already been received"
        key, customer, units = event
        if key in self.keys:
            self.refused += 1
            return refusal
        self.keys.add(key)
        self.owed[customer] = self.owed.get(customer, 0) + units
        return 200, "{}"


T = TypeVar("T", bound=Invoicing)


@contextmanager
def invoicing_system(system: T) -> Iterator[tuple[T, str]]:
    """Serve an invoicing system on a port of this machine."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                status, text = system.take(self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield system, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def push_until_done(
    url: str, invoicing: str, token: str, *options: str, stride: int, position: str = "kept"
) -> int:
    """Run the worker until one run is not killed, and return how many were."""
    words = [str(PROGRAM), position, str(stride), url, invoicing, *options]
    environment = {**os.environ, "LEASEHOLD_TOKEN": token, "INVOICING_TOKEN": "x"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, KILLER, *words, env=environment, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await asyncio.wait_for(process.communicate(), 300)
    assert said.decode().split()[-2:] == ["exit", "0"], said
    return int(said.split()[said.split().index(b"killed") + 1])


@pytest.mark.parametrize(
    ("shape", "position", "stride"),
    cases([("cloudevents", "kept", 7), ("lago", "kept", 5), ("stripe", "restart", 4)], short=1),
)
async def test_a_worker_that_is_killed_again_and_again_bills_each_unit_once(
    admin_harness: AdminHarness,
    admin: httpx.AsyncClient,
    finance: httpx.AsyncClient,
    region: Region,
    tmp_path: Path,
    shape: str,
    position: str,
    stride: int,
) -> None:
    """Three tenants use a month. The worker is killed a few lines later each time.

    With `restart`, each run even begins without the position that was kept.
    """
    await put_off(admin_harness.owner, "seal")
    await admin.put("/v1/tenants/zeta", json={"name": "Zeta", "external_ids": {shape: "customer-7"}})
    for tenant, units in (("zeta", 3), ("acme", 2), ("beta", 40)):
        await region.use(f"exports:tenant={tenant}", "2026-11", [Used(at("18T10:05"), units)])
    await sealed(admin_harness)
    token = (await issue_token(admin_harness.owner, ["usage:read"], "push", admin_harness.clock.now())).token
    coordinator = admin_harness.transport.app
    assert isinstance(coordinator, FastAPI)
    with invoicing_system(Invoicing()) as (system, invoicing):
        async with served(coordinator) as url:
            place = tmp_path / "position"
            runs = await push_until_done(
                url, invoicing, token, "--as", shape, "--position", str(place), stride=stride, position=position
            )
            changes, _ = await steps(finance)
        assert runs > 60 // stride
    assert len(system.keys) == len(changes)
    assert system.owed == {"acme": 17, "customer-7": 3, "beta": 40}
    assert system.refused > 0
