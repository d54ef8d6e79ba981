"""`adjustment` and `webhook` work against a real coordinator."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import asyncpg
import pytest
from structlog.testing import capture_logs

from coordinator.access.issue_token import issue_token
from tests.integration.cli.test_limits_commands import DOCUMENT, Shell
from tests.integration.regional_agent.world import another_coordinator

pytestmark = pytest.mark.anyio

MONTH = datetime.now(UTC).strftime("%Y-%m")
WHY = ("--reason", "an outage", "--document", "T-1")


@pytest.fixture
async def shells(database: str) -> AsyncIterator[list[Shell]]:
    """Return the shells of two people, since an adjustment is approved by another person."""
    connection = await asyncpg.connect(database)
    try:
        tokens = [(await issue_token(connection, ["admin"], "test", datetime.now(UTC))).token for _ in range(2)]
    finally:
        await connection.close()
    with capture_logs():
        async with another_coordinator(database) as url:
            yield [Shell({"LEASEHOLD_URL": url, "LEASEHOLD_TOKEN": token, "COLUMNS": "200"}) for token in tokens]


async def test_an_adjustment_is_proposed_by_one_and_approved_by_another(shells: list[Shell]) -> None:
    one, other = shells
    await one.output("apply", "-y", "-f", "-", stdin=DOCUMENT)
    made = await one.json("adjustment", "propose", "credit", "exports:tenant=acme", MONTH, "5", *WHY)
    assert "cannot approve" in await one.error("adjustment", "approve", made["id"])
    assert made["id"] in await other.output("adjustment", "list", "--state", "proposed", "--period", MONTH)
    assert "approved" in await other.output("adjustment", "approve", made["id"])
    assert (await one.json("adjustment", "show", made["id"]))["booked_in"] == MONTH
    assert "T-1" in await one.output("adjustment", "show", made["id"])
    assert await one.json("adjustment", "list", "--quota", "exports:tenant=nobody") == []


async def test_an_adjustment_is_withdrawn(shells: list[Shell]) -> None:
    one, other = shells
    await one.output("apply", "-y", "-f", "-", stdin=DOCUMENT)
    made = await one.json("adjustment", "propose", "debit", "exports:tenant=acme", MONTH, "5", *WHY)
    assert "withdrawn" in await one.output("adjustment", "withdraw", made["id"])
    assert "was withdrawn" in await other.error("adjustment", "approve", made["id"])
    assert "units" in await one.error("adjustment", "propose", "debit", "exports:tenant=acme", MONTH, "0", *WHY)


async def test_a_webhook_is_added_paused_rotated_and_deleted(shells: list[Shell]) -> None:
    shell, _ = shells
    assert "secret: whsec_" in await shell.output("webhook", "add", "https://192.0.2.1/told", "period.closed")
    (made,) = await shell.json("webhook", "list")
    assert (made["events"], "secret" in made) == (["period.closed"], False)
    assert "yes" in await shell.output("webhook", "pause", made["id"])
    assert " no " in await shell.output("webhook", "pause", made["id"], "--resume")
    assert (await shell.json("webhook", "rotate", made["id"]))["secret"].startswith("whsec_")
    assert "deliveries to be sent again: 0" in await shell.output("webhook", "replay", made["id"])
    assert "url" in await shell.error("webhook", "add", "http://192.0.2.1/told", "period.closed")
    misspelt = await shell.error("webhook", "add", "https://192.0.2.1/told", "period.clozed")
    assert (misspelt.count("\n"), "'allowance.overdrawn'" in misspelt) == (1, True), (
        "told once, with the events there are"
    )
    await shell.output("webhook", "delete", made["id"])
    assert "no such webhook" in await shell.error("webhook", "delete", made["id"])
