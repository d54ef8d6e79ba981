"""Webhook events are delivered to receivers that accept, fail, hang, are down, or have gone."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
import standardwebhooks
from pydantic import SecretStr

from coordinator.database.engine import Database, open_database
from coordinator.exchange.expire_leases import expire_leases
from coordinator.main import create_app
from coordinator.settings import CoordinatorSettings
from coordinator.usage.find_drift import DRIFTING, find_drift
from coordinator.webhooks.delivery import deliver_webhooks
from coordinator.webhooks.rules import MAX_ATTEMPTS, signature_headers
from tests.conftest import restricted
from tests.integration.coordinator.adjustments.test_adjustments import People
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, Region, Used, open_region, problem
from tests.integration.coordinator.fixtures import put_off

pytestmark = pytest.mark.anyio

ACME, NOVEMBER = "exports:tenant=acme", "2026-11"
AT = datetime(2026, 11, 18, 9, 5, tzinfo=UTC)
EVERYTHING = ["threshold.reached", "period.closed", "adjustment.approved", "suspense.new", "drift.found"]
GUIDE = Path(__file__).parents[4] / "docs/guides/webhooks.md"


class Receiver:
    """A real server on this machine that answers as the test sets."""

    def __init__(self) -> None:
        self.status = 200
        self.hangs = False
        self.heard: list[tuple[dict[str, str], bytes]] = []
        self.arrived = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/told"

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.heard]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.heard]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head)}
            self.heard.append((headers, await reader.readexactly(int(headers["content-length"]))))
            self.arrived.set()
            if self.hangs:
                await reader.read()
            writer.write(f"HTTP/1.1 {self.status} X\r\nLocation: {self.url}\r\nContent-Length: 0\r\n\r\n".encode())
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    await receiver.start()
    yield receiver
    await receiver.stop()


@pytest.fixture
async def outbox(admin_harness: AdminHarness, database: str) -> AsyncIterator[Database]:
    """Stop the coordinator's own delivery, so that only tests deliver."""
    await put_off(admin_harness.owner, "deliver_webhooks")
    async with open_database(restricted(database), 4) as opened:
        yield opened


@pytest.fixture
async def people(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> People:
    await admin.put("/v1/limits", json=DOCUMENT)
    return People(await admin_harness.caller("adjust:propose"), await admin_harness.caller("adjust:approve"))


async def registered(admin: httpx.AsyncClient, url: str, *events: str) -> dict[str, Any]:
    answer = await admin.post("/v1/webhooks", json={"url": url, "events": list(events or EVERYTHING)})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def told(admin_harness: AdminHarness, outbox: Database, timeout_s: float = 5) -> int:
    addresses = await outbox.read(
        lambda c: c.fetchval("SELECT addresses FROM installation")
    )  # if the webhook is registered by now
    return await deliver_webhooks(outbox, admin_harness.clock, frozenset(addresses or ["here"]), timeout_s)


async def state(admin: httpx.AsyncClient, made: dict[str, Any]) -> tuple[int, int]:
    found = (await admin.get(f"/v1/webhooks/{made['id']}")).json()
    return found["waiting"], found["dead"]


async def test_an_event_is_delivered_signed_and_once(
    admin_harness: AdminHarness, outbox: Database, admin: httpx.AsyncClient, people: People, receiver: Receiver
) -> None:
    made = await registered(admin, receiver.url)
    await admin.put("/v1/tenants/acme", json={"name": "Acme GmbH", "external_ids": {"stripe": "cus_7"}})
    approved = await people.adjusted()
    assert await told(admin_harness, outbox) == 1
    assert await told(admin_harness, outbox) == 0
    (body,) = receiver.bodies
    assert body["tenant"] == {"id": "acme", "name": "Acme GmbH", "external_ids": {"stripe": "cus_7"}}
    assert (body["kind"], body["data"]["id"], body["id"]) == ("adjustment.approved", approved["id"], receiver.ids[0])
    assert "secret" not in (await admin.get(f"/v1/webhooks/{made['id']}")).json()
    assert is_genuine(made["secret"], *receiver.heard[0], admin_harness.clock.time)
    assert not is_genuine(made["secret"], receiver.heard[0][0], receiver.heard[0][1] + b" ", admin_harness.clock.time)
    assert not is_genuine("whsec_b3RoZXI=", *receiver.heard[0], admin_harness.clock.time)
    verify(made["secret"], *receiver.heard[0])
    assert receiver.heard[0][0]["user-agent"] == "Leasehold-Webhooks"
    admin_harness.clock.move(minutes=6)
    assert not is_genuine(made["secret"], *receiver.heard[0], admin_harness.clock.time)


def is_genuine(secret: str, headers: dict[str, str], body: bytes, now: datetime) -> bool:
    """Verify a delivery by the guide's own script, which uses nothing of ours."""
    (script,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names = ("webhook-id", "webhook-timestamp", "webhook-signature")
    words = [secret, *(headers[name] for name in names), str(int(now.timestamp()))]
    done = subprocess.run([sys.executable, "-c", script, *words], input=body, check=False, timeout=60)
    return done.returncode == 0


def verify(secret: str, headers: dict[str, str], body: bytes) -> None:
    """Verify a delivery with the package of Standard Webhooks, in which the age of the signature is the real one."""
    second = str(int(datetime.now(UTC).timestamp()))
    resigned = signature_headers(UUID(headers["webhook-id"]), [secret], datetime.fromtimestamp(int(second), UTC), body)
    standardwebhooks.Webhook(secret).verify(body, resigned)
    at = datetime.fromtimestamp(int(headers["webhook-timestamp"]), UTC)
    signature = standardwebhooks.Webhook(secret).sign(headers["webhook-id"], at, body.decode())
    assert signature in headers["webhook-signature"].split()


async def test_a_new_and_the_old_secret_both_sign_for_a_day(
    admin_harness: AdminHarness, outbox: Database, admin: httpx.AsyncClient, people: People, receiver: Receiver
) -> None:
    old = await registered(admin, receiver.url)
    new = (await admin.post(f"/v1/webhooks/{old['id']}:rotate")).json()
    assert new["secret"] != old["secret"]
    await people.adjusted()
    await told(admin_harness, outbox)
    assert all(is_genuine(each["secret"], *receiver.heard[0], admin_harness.clock.time) for each in (old, new))
    admin_harness.clock.move(hours=24)
    await people.adjusted()
    await told(admin_harness, outbox)
    assert [is_genuine(each["secret"], *receiver.heard[1], admin_harness.clock.time) for each in (old, new)] == [
        False,
        True,
    ]


@pytest.mark.parametrize("how", ["fails", "redirects", "hangs", "is down"])
async def test_a_failed_delivery_is_retried_later(
    admin_harness: AdminHarness,
    outbox: Database,
    admin: httpx.AsyncClient,
    people: People,
    receiver: Receiver,
    how: str,
) -> None:
    made = await registered(admin, receiver.url)
    await people.adjusted()
    receiver.status, receiver.hangs = {"fails": 500, "redirects": 302}.get(how, 200), how == "hangs"
    if how == "is down":
        await receiver.stop()
    assert await told(admin_harness, outbox, 0.5) == 1
    assert await told(admin_harness, outbox, 0.5) == 0  # it pauses
    assert await state(admin, made) == (1, 0)
    listed = (await admin.get(f"/v1/webhooks/{made['id']}/deliveries")).json()["data"]
    assert [(each["attempts"], bool(each["status"] or each["error"])) for each in listed] == [(1, True)]
    receiver.status, receiver.hangs = 200, False
    if how == "is down":
        await receiver.start()
    admin_harness.clock.move(seconds=5)
    assert await told(admin_harness, outbox) == 1
    assert await state(admin, made) == (0, 0)
    assert len(set(receiver.ids)) == 1


async def test_an_event_never_accepted_is_a_dead_letter_that_people_replay(
    admin_harness: AdminHarness, outbox: Database, admin: httpx.AsyncClient, people: People, receiver: Receiver
) -> None:
    made = await registered(admin, receiver.url)
    await people.adjusted()
    receiver.status = 503
    for _ in range(MAX_ATTEMPTS):
        assert await told(admin_harness, outbox) == 1
        admin_harness.clock.move(hours=6)
    assert await told(admin_harness, outbox) == 0
    (dead,) = (await admin.get(f"/v1/webhooks/{made['id']}/deliveries?dead=true")).json()["data"]
    assert (dead["attempts"], dead["status"], dead["kind"]) == (MAX_ATTEMPTS, 503, "adjustment.approved")
    receiver.status = 200
    replayed = await admin.post(f"/v1/webhooks/{made['id']}:replay", json={"events": [dead["event"]]})
    assert replayed.json() == {"deliveries": 1}
    assert await told(admin_harness, outbox) == 1
    assert (await state(admin, made), set(receiver.ids)) == ((0, 0), {dead["event"]})


async def test_a_receiver_that_answers_gone_gets_no_more_events(
    admin_harness: AdminHarness, outbox: Database, admin: httpx.AsyncClient, people: People, receiver: Receiver
) -> None:
    made = await registered(admin, receiver.url)
    await people.adjusted()
    receiver.status = 410
    assert await told(admin_harness, outbox) == 1
    admin_harness.clock.move(days=1)
    assert (await told(admin_harness, outbox), await state(admin, made)) == (0, (0, 1))


async def test_an_event_is_redelivered_under_its_id_after_a_crash(
    admin_harness: AdminHarness, outbox: Database, admin: httpx.AsyncClient, people: People, receiver: Receiver
) -> None:
    made = await registered(admin, receiver.url)
    await people.adjusted()
    receiver.hangs = True
    dying = asyncio.create_task(told(admin_harness, outbox, 60))
    await asyncio.wait_for(receiver.arrived.wait(), 20)
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    receiver.hangs = False
    assert await told(admin_harness, outbox) == 0  # the dead coordinator holds it for a while
    admin_harness.clock.move(seconds=60)
    assert await told(admin_harness, outbox) == 1
    assert (len(receiver.ids), len(set(receiver.ids)), await state(admin, made)) == (2, 1, (0, 0))


async def test_several_coordinators_deliver_each_event_once(
    admin_harness: AdminHarness, outbox: Database, admin: httpx.AsyncClient, people: People, receiver: Receiver
) -> None:
    await registered(admin, receiver.url)
    for _ in range(30):
        await people.adjusted(units=1)
    done = await asyncio.gather(*(told(admin_harness, outbox) for _ in range(3)))
    assert (sum(done), len(receiver.ids), len(set(receiver.ids))) == (30, 30, 30)


async def test_events_of_a_paused_webhook_wait(
    admin_harness: AdminHarness, outbox: Database, admin: httpx.AsyncClient, people: People, receiver: Receiver
) -> None:
    made = await registered(admin, receiver.url)
    assert (await admin.post(f"/v1/webhooks/{made['id']}:pause")).json()["paused"] is True
    await people.adjusted()
    assert (await told(admin_harness, outbox), await state(admin, made)) == (0, (1, 0))
    await admin.post(f"/v1/webhooks/{made['id']}:resume")
    assert await told(admin_harness, outbox) == 1
    assert (await admin.delete(f"/v1/webhooks/{made['id']}")).status_code == 204
    assert (await admin.delete(f"/v1/webhooks/{made['id']}")).status_code == 404
    await people.adjusted()
    assert await told(admin_harness, outbox) == 0
    assert await admin_harness.owner.fetchval("SELECT count(*) FROM delivery") == 0


async def test_a_failed_transaction_sends_no_event(
    admin_harness: AdminHarness, outbox: Database, admin: httpx.AsyncClient, people: People, receiver: Receiver
) -> None:
    """Refused requests send none either."""
    await registered(admin, receiver.url)
    answer = await people.approve(await people.proposed(kind="debit", units=1001))
    assert answer.status_code == 409
    assert (await told(admin_harness, outbox), await admin_harness.owner.fetchval("SELECT count(*) FROM outbox")) == (
        0,
        0,
    )


@pytest.fixture
async def region(admin_harness: AdminHarness, admin: httpx.AsyncClient, people: People) -> Region:
    return await open_region(admin_harness, admin, "eu-west")


async def test_a_threshold_is_announced_once_in_a_period(
    admin_harness: AdminHarness,
    outbox: Database,
    admin: httpx.AsyncClient,
    receiver: Receiver,
    region: Region,
    people: People,
) -> None:
    await registered(admin, receiver.url)
    for units, percents in ((499, []), (1, [50]), (10, []), (490, [80, 100])):
        before = len(receiver.heard)
        await region.use(ACME, NOVEMBER, [Used(AT, units)])
        await told(admin_harness, outbox)
        assert sorted(body["data"]["percent"] for body in receiver.bodies[before:]) == percents
    assert receiver.bodies[0]["data"] == {
        "quota": ACME,
        "period": NOVEMBER,
        "percent": 50,
        "consumed": 500,
        "limit": 1000,
    }
    await people.adjusted(units=1000)  # half of it is used now, which was announced before
    await region.use(ACME, NOVEMBER, [Used(AT, 700)])
    assert await told(admin_harness, outbox) == 1  # the adjustment: 80 % was announced before, too


async def limited(admin: httpx.AsyncClient, **changes: Any) -> None:
    """Apply another document, in which the first quota is another."""
    first, *others = DOCUMENT["quotas"]
    answer = await admin.put("/v1/limits", json=DOCUMENT | {"quotas": [first | changes, *others]})
    assert answer.status_code == 200, answer.text


async def test_several_coordinators_announce_a_quotas_own_thresholds_once(
    database: str,
    admin_harness: AdminHarness,
    outbox: Database,
    admin: httpx.AsyncClient,
    receiver: Receiver,
    region: Region,
) -> None:
    """Thresholds are in units or in percent, also above the limit, since usage without a lease is booked too."""
    await registered(admin, receiver.url)
    await limited(admin, thresholds=[10, 900])
    await region.use(ACME, NOVEMBER, [Used(AT, 10)])
    settings = CoordinatorSettings(database_url=SecretStr(restricted(database)), database_pool_size=2, clock_limit_ms=0)
    app = create_app(settings, admin_harness.clock)
    async with app.router.lifespan_context(app):
        token = region.client.headers["Authorization"]
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://another", headers={"Authorization": token}
        ) as another:
            region.client = another
            await region.use(ACME, NOVEMBER, [Used(AT, 900)])
            await limited(admin, thresholds=["1%", "91%", "120%"])  # the first was passed before it was set
            await region.use(ACME, NOVEMBER, [Used(AT, 300)])
    await told(admin_harness, outbox)
    named = [str(body["data"].get("units") or f"{body['data']['percent']}%") for body in receiver.bodies]
    assert sorted(named) == ["10", "120%", "900"]


async def test_a_limit_that_is_lowered_reaches_a_threshold(
    admin_harness: AdminHarness, outbox: Database, admin: httpx.AsyncClient, receiver: Receiver, region: Region
) -> None:
    await registered(admin, receiver.url)
    await region.use(ACME, NOVEMBER, [Used(AT, 450)])
    await limited(admin, limit=500)
    await region.exchange(ACME, demands=[{"quota": ACME}])
    await told(admin_harness, outbox)
    told_of = [(body["data"]["percent"], body["data"]["limit"]) for body in receiver.bodies]
    assert sorted(told_of) == [(50, 500), (80, 500)]


async def test_suspense_and_drift_and_a_close_are_announced(
    admin_harness: AdminHarness, outbox: Database, admin: httpx.AsyncClient, receiver: Receiver, region: Region
) -> None:
    await registered(admin, receiver.url)
    await region.use(ACME, NOVEMBER, [Used(AT, 10)])
    await region.exchange(ACME, demands=[{"quota": ACME, "waiting": 7}])
    admin_harness.clock.move(seconds=90)
    await outbox.run(lambda c: expire_leases(c, admin_harness.clock.now()))
    await told(admin_harness, outbox)
    assert [(body["kind"], body["data"]["units"]) for body in receiver.bodies] == [("suspense.new", 7)]
    await admin_harness.owner.execute("UPDATE lease SET region_consumed = 11")
    for _ in range(2):
        await outbox.run(lambda c: find_drift(c, admin_harness.clock.now()))
    await told(admin_harness, outbox)
    assert [body["data"].get("region_consumed") for body in receiver.bodies[1:]] == [11]
    await admin_harness.owner.execute("UPDATE lease SET region_consumed = 10")
    admin_harness.clock.time = datetime(2026, 12, 2, tzinfo=UTC)
    for _ in range(2):
        await admin.post(f"/v1/periods/{NOVEMBER}:close", json={"carry_suspense": True})
        admin_harness.clock.move(minutes=20)
    await told(admin_harness, outbox)
    assert [(body["kind"], body["data"]["period"]) for body in receiver.bodies[2:]] == [("period.closed", NOVEMBER)]


MANY_LEASES = """
INSERT INTO pool (quota, period, name) SELECT 'q' || n, '2026-11', 'q' || n FROM generate_series(1, 3000) AS n;
INSERT INTO lease (epoch, quota, period, region, reported_at, expires_at)
SELECT (SELECT max(epoch) FROM region_epoch), 'q' || n, '2026-11', 'eu-west', now(), now() + interval '1 hour'
FROM generate_series(1, 3000) AS n;
ANALYZE lease;
"""


async def test_the_search_for_drift_reads_only_drifting_leases(
    admin_harness: AdminHarness, outbox: Database, admin: httpx.AsyncClient, receiver: Receiver, region: Region
) -> None:
    await registered(admin, receiver.url, "drift.found")
    await region.use(ACME, NOVEMBER, [Used(AT, 10)])
    await admin_harness.owner.execute(MANY_LEASES)
    await admin_harness.owner.execute("UPDATE lease SET region_consumed = 1 WHERE quota IN ('q7', 'q8', 'q9')")
    await admin_harness.owner.execute("UPDATE lease SET state = 'quarantined' WHERE quota = 'q8'")
    assert await rows_read(admin_harness, DRIFTING) == 2
    await outbox.run(lambda c: find_drift(c, admin_harness.clock.now()))
    await told(admin_harness, outbox)
    assert sorted(body["data"]["quota"] for body in receiver.bodies) == ["q7", "q9"]


async def rows_read(admin_harness: AdminHarness, sql: str) -> int:
    """Count rows that were read and filtered out as well."""
    found = await admin_harness.owner.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql.replace('$1', '100')}")
    nodes, read = [json.loads(found)[0]["Plan"]], 0
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", [])
        read += (0 if "Plans" in node else node["Actual Rows"]) + node.get("Rows Removed by Filter", 0)
    return read


async def test_the_coordinator_delivers_by_itself(admin: httpx.AsyncClient, people: People, receiver: Receiver) -> None:
    await registered(admin, receiver.url)
    await people.adjusted()
    await asyncio.wait_for(receiver.arrived.wait(), 30)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"url": "http://example.com/"}, ("url", "format")),
        ({"url": "http://10.0.0.1/"}, ("url", "format")),
        ({"url": "ftp://127.0.0.1/"}, ("url", "format")),
        ({"url": "https://user:pass@example.com/"}, ("url", "format")),
        ({"url": "https://[::1"}, ("url", "format")),
        ({"url": "https://"}, ("url", "format")),
        ({"events": []}, ("events", "min_length")),
        ({"events": ["nothing"]}, ("events[0]", "enum")),
    ],
)
async def test_faults_of_a_webhook_are_named(
    admin: httpx.AsyncClient, changes: dict[str, Any], fault: tuple[str, str]
) -> None:
    body = {"url": "https://10.0.0.1/told", "events": EVERYTHING}
    assert problem(await admin.post("/v1/webhooks", json=body | changes)) == (422, [fault])
    assert (await admin.post("/v1/webhooks", json=body)).status_code == 201  # private, which only an admin may set


async def test_a_scheme_in_capitals_is_accepted(admin: httpx.AsyncClient) -> None:
    body = {"url": "HTTPS://example.org/Hook", "events": ["period.closed"]}
    made = await admin.post("/v1/webhooks", json=body)
    assert (made.status_code, made.json()["url"]) == (201, "https://example.org/Hook")
    refused = await admin.post("/v1/webhooks", json={**body, "url": "HTTP://example.org/"})
    assert problem(refused) == (422, [("url", "format")])
