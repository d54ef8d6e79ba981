"""A coordinator on a copy of an installation's database sends nothing until an admin confirms it."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from urllib.parse import urlsplit
from uuid import UUID

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from coordinator.access.issue_token import issue_token
from coordinator.database.engine import open_database
from coordinator.installation.operations import look_at_installation
from coordinator.installation.rules import addresses_of
from coordinator.main import create_app
from coordinator.settings import CoordinatorSettings
from coordinator.webhooks.deliveries import take_due_deliveries
from coordinator.webhooks.delivery import deliver_webhooks
from coordinator.webhooks.outbox import enqueue
from coordinator.webhooks.rules import EventKind, event
from leasehold.cli.app import app as cli
from tests.conftest import PostgresServer, copied, restricted
from tests.integration.coordinator.admin_harness import AdminHarness
from tests.integration.coordinator.fixtures import NOON, StandingClock, connected, put_off, served
from tests.integration.coordinator.proof.conftest import harness_on

pytestmark = pytest.mark.anyio
NOWHERE = "http://127.0.0.1:1/"


async def register(url: str) -> UUID:
    """Register as the first coordinator of a new database does; one event waits."""
    async with connected(url) as owner:
        found = await look_at_installation(owner, addresses_of(url, ""), NOON)
        assert found.is_confirmed
        await owner.execute(
            """INSERT INTO webhook (id, url, events, secret, created_at, created_by)
            VALUES (gen_random_uuid(), $1, '{period.closed}', 'whsec_c2VjcmV0', $2, gen_random_uuid())""",
            NOWHERE,
            NOON,
        )
        await enqueue(owner, [event(EventKind.PERIOD_CLOSED, {"period": "2026-10"})], NOON)
        await put_off(owner, "deliver_webhooks")
        return found.id


@pytest.fixture
def original(postgres_server: PostgresServer) -> Iterator[tuple[str, UUID]]:
    with copied(postgres_server) as url:
        yield url, asyncio.run(register(url))


@pytest.fixture
def copy(postgres_server: PostgresServer, original: tuple[str, UUID]) -> Iterator[str]:
    with copied(postgres_server, urlsplit(original[0]).path.strip("/")) as url:
        yield url


@pytest.fixture
async def admin_harness(copy: str) -> AsyncIterator[AdminHarness]:
    async with harness_on(copy) as admin_harness:
        yield admin_harness


async def attempts(url: str, name: str = "") -> int:
    async with open_database(restricted(url), 3) as database:
        return await deliver_webhooks(database, StandingClock(), addresses_of(url, name))


async def test_events_are_sent_where_the_installation_was_registered(original: tuple[str, UUID]) -> None:
    url, _ = original
    assert await attempts(url) == 1
    async with connected(url) as owner, connected(restricted(url)) as coordinator:
        due = await take_due_deliveries(owner, NOON + timedelta(days=1), 1)
        identifier = await coordinator.fetchval("SELECT system_identifier FROM pg_control_system()")
        assert await owner.fetchval("SELECT system_identifier FROM installation") == str(identifier)
    assert json.loads(due[0].body)["installation"] == str(original[1])


async def test_a_fail_over_needs_no_confirmation_where_the_address_stays(original: tuple[str, UUID]) -> None:
    """A standby has the same cluster identifier, and is reached by the same name or was named in the URL before."""
    url, _ = original
    parts = urlsplit(url)
    both = parts._replace(netloc=f"{parts.netloc},standby.example:5432").geturl()
    async with connected(url) as owner:
        assert (await look_at_installation(owner, addresses_of(both, ""), NOON)).is_confirmed


async def test_a_copy_sends_nothing_until_it_is_confirmed(
    original: tuple[str, UUID], copy: str, admin_harness: AdminHarness
) -> None:
    admin = await admin_harness.caller("admin")
    assert await attempts(copy) == 0
    found = (await admin.get("/v1/installation")).json()
    assert (found["id"], found["is_confirmed"]) == (str(original[1]), False)
    assert "restored or copied" in found["reason"]
    async with asyncio.timeout(30):
        while "installation_unconfirmed" not in (await admin.get("/readyz")).text:  # noqa: ASYNC110 - it is asked
            await asyncio.sleep(0.05)
    assert (await admin.get("/readyz")).json()["status"] == "degraded"
    confirmed = await admin.post("/v1/installation:confirm", json={})
    assert (confirmed.status_code, confirmed.json()["id"], confirmed.json()["is_confirmed"]) == (200, found["id"], True)
    assert await attempts(copy) == 1
    audit = (await admin.get(f"/v1/audit?object={found['id']}")).json()["data"]
    assert [each["action"] for each in audit] == ["installation.confirmed"]


async def test_a_copy_may_become_an_installation_of_its_own(
    original: tuple[str, UUID], admin_harness: AdminHarness
) -> None:
    admin = await admin_harness.caller("admin")
    confirmed = (await admin.post("/v1/installation:confirm", json={"new_id": True})).json()
    assert confirmed["is_confirmed"]
    assert confirmed["id"] != str(original[1])
    assert (await admin.get("/v1/installation")).json()["id"] == confirmed["id"]


async def test_only_admins_confirm(admin_harness: AdminHarness) -> None:
    finance = await admin_harness.caller("usage:read", "audit:read", "period:close")
    assert (await finance.get("/v1/installation")).status_code == 403
    assert (await finance.post("/v1/installation:confirm", json={})).status_code == 403


async def test_the_files_of_a_database_that_were_copied_elsewhere_send_nothing(original: tuple[str, UUID]) -> None:
    """A file copy has the same cluster identifier; it is recognized by its address, or by the name in the settings."""
    url, _ = original
    assert await attempts(url, name="staging") == 0
    elsewhere = urlsplit(url)._replace(netloc="user@restore-drill:5432").geturl()
    async with connected(url) as owner:
        seen = await look_at_installation(owner, addresses_of(elsewhere, ""), NOON)
    assert (seen.is_confirmed, "restore-drill:5432" in (seen.reason or "")) == (False, True)


async def test_the_command_shows_and_confirms(copy: str, admin_harness: AdminHarness) -> None:
    _, token = await issue_token(admin_harness.owner, ["admin"], "ops", NOON)
    settings = CoordinatorSettings(database_url=SecretStr(copy), database_pool_size=2)

    def said_by(command: str, url: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["installation", command, "--url", url], env={"LEASEHOLD_TOKEN": token})
        return done.exit_code, done.output

    async with served(create_app(settings)) as url:
        status, said = await asyncio.to_thread(said_by, "show", url)
        assert (status, "is not confirmed, and no webhooks are sent" in said) == (0, True), said
        status, said = await asyncio.to_thread(said_by, "confirm", url)
        assert (status, ", confirmed at " in said) == (0, True), said
    assert await attempts(copy) == 1
