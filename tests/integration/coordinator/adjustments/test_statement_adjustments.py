"""Statements have a line for each adjustment, with its document, and their sum is what is billed."""

from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from coordinator.usage.rules.statement import StatementId
from tests.integration.coordinator.adjustments.test_adjustments import (
    ACME,
    NOVEMBER,
    People,
    all_agree,
    closed,
    people,
    region,
)
from tests.integration.coordinator.admin_harness import AdminHarness, Region, Used, problem, sealed
from tests.integration.coordinator.proof.test_line_proof import (
    Check,
    auditor,
    check,
    is_proven,
    newest,
    proof_of,
    proof_path,
)
from tests.integration.coordinator.spreadsheets import csv_rows
from tests.integration.coordinator.usage.test_statements import Page, lines, statement

__all__ = ["auditor", "check", "people", "region"]

pytestmark = pytest.mark.anyio

DECEMBER = "2026-12"


async def booked(admin_harness: AdminHarness, region: Region) -> None:
    """Report usage, because positions belong to reports."""
    await region.exchange(ACME)
    await sealed(admin_harness)


async def adds_up(finance: httpx.AsyncClient, period: str) -> dict[str, Any]:
    """Compare the only tenant's statement with the trial balance of the period."""
    found = await statement(finance, period)
    balance = (await finance.get(f"/v1/periods/{period}/trial-balance")).json()
    of = {each["account"]: each["transfers"] for each in balance["accounts"]}
    assert sum(line["units"] for line in found["lines"]) == found["billed"]
    assert found["billed"] == of["consumed"] + of["estimated"] - of["written_off"]
    signs = {"credit": 1, "debit": -1, "write_off": 1}
    moved = [signs[line["kind"]] * line["adjustment"]["units"] for line in found["lines"] if line["adjustment"]]
    assert sum(moved) == of["adjustment"]
    return found


async def test_each_adjustment_is_a_line_and_no_statement_from_before_it_changes(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region, people: People
) -> None:
    await sealed(admin_harness)
    first = await adds_up(finance, NOVEMBER)
    usage = (1, "usage", "exports", NOVEMBER, "eu-west", 60)
    assert (lines(first), first["billed"], first["lines"][0]["adjustment"]) == ([usage], 60, None)
    of = StatementId(NOVEMBER, "acme")
    shapes = ["", "&format=csv", "&format=html"]
    paths = [f"/v1/statements/{of}?as_of={first['as_of']}{shape}" for shape in shapes] + [first["lines"][0]["reports"]]
    before = [(await finance.get(path)).content for path in paths]

    credit = await people.adjusted(units=100)
    one = await people.adjusted(kind="write_off", units=30, document="T-2", reason="a fault of ours")
    admin_harness.clock.move(seconds=1)
    other = await people.adjusted(kind="write_off", units=10)
    debit = await people.adjusted(kind="debit", units=140)
    await people.proposed(kind="write_off", units=7)
    withdrawn = await people.proposed(kind="write_off", units=8)
    await people.proposer.post(f"/v1/adjustments/{withdrawn['id']}:withdraw")
    assert await statement(finance, NOVEMBER) == first  # it contains only what is sealed

    await booked(admin_harness, region)
    found = await adds_up(finance, NOVEMBER)
    assert lines(found) == [
        usage,
        (2, "credit", "exports", NOVEMBER, None, 0),
        (3, "debit", "exports", NOVEMBER, None, 0),
        (4, "write_off", "exports", NOVEMBER, None, -30),
        (5, "write_off", "exports", NOVEMBER, None, -10),
    ]
    assert found["billed"] == 20
    for line, made in zip(found["lines"][1:], [credit, debit, one, other], strict=True):
        shown = {name: made[name] for name in ("id", "units", "document", "reason", "approved_at")}
        assert line["adjustment"] == shown | {"path": f"/v1/adjustments/{made['id']}", "quota_key": made["quota"]}
        assert (await finance.get(line["adjustment"]["path"])).json() == made
        [source] = (await finance.get(line["reports"])).json()["data"]
        assert (source["movement_id"], source["units"], source["seq"]) == (made["id"], line["units"], None)
    assert [(await finance.get(path)).content for path in paths] == before
    await all_agree(admin_harness, finance)


async def test_spent_units_of_a_credit_are_billed(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region, people: People
) -> None:
    await people.adjusted(units=100)
    await region.use(ACME, NOVEMBER, [Used(datetime(2026, 11, 18, 9, 6, tzinfo=UTC), 1040)])
    await sealed(admin_harness)
    assert (await adds_up(finance, NOVEMBER))["billed"] == 1100


@pytest.mark.usefixtures("region")
async def test_a_debit_before_the_first_lease_is_one_line(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region, people: People
) -> None:
    """Its movement funds the pool as well."""
    made = await people.adjusted(quota="exports:tenant=globex", kind="debit", units=300)
    await booked(admin_harness, region)
    found = (await finance.get(f"/v1/periods/{NOVEMBER}/statement?tenant=globex")).json()
    assert lines(found) == [(1, "debit", "exports", NOVEMBER, None, 0)]
    [source] = (await finance.get(found["lines"][0]["reports"])).json()["data"]
    assert (source["movement_id"], source["transfers"]) == (made["id"], 1)
    assert len((await statement(finance, NOVEMBER))["lines"]) == 1  # none for other tenants


async def test_a_closed_period_is_corrected_in_the_statement_of_the_current_one(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient, region: Region, people: People
) -> None:
    admin_harness.clock.time = datetime(2026, 12, 2, 12, tzinfo=UTC)
    await people.adjusted(kind="write_off", units=10)
    await closed(admin_harness, admin, NOVEMBER)
    final = await adds_up(finance, NOVEMBER)
    assert (lines(final)[1:], final["billed"]) == ([(2, "write_off", "exports", NOVEMBER, None, -10)], 50)
    path = f"/v1/statements/{StatementId(NOVEMBER, 'acme')}"
    before = [(await finance.get(f"{path}?format={shape}")).content for shape in ("json", "csv", "html")]

    for kind in ("credit", "debit", "write_off"):
        await people.adjusted(kind=kind, units=5)
    await booked(admin_harness, region)
    found = await adds_up(finance, DECEMBER)
    assert lines(found) == [
        (1, "credit", "exports", NOVEMBER, None, 0),
        (2, "debit", "exports", NOVEMBER, None, 0),
        (3, "write_off", "exports", NOVEMBER, None, -5),
    ]
    assert found["billed"] == -5
    assert [(await finance.get(f"{path}?format={shape}")).content for shape in ("json", "csv", "html")] == before
    admin_harness.clock.time = datetime(2027, 1, 2, 12, tzinfo=UTC)
    await closed(admin_harness, admin, DECEMBER)
    ended = await adds_up(finance, DECEMBER)
    assert (lines(ended), ended["is_final"]) == (lines(found), True)
    await all_agree(admin_harness, finance)


async def test_a_sheet_has_the_document_and_the_reason(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region, people: People
) -> None:
    await people.adjusted(kind="write_off", units=40, document="=1+1", reason="<b>ours</b>")
    await booked(admin_harness, region)
    path = f"/v1/statements/{StatementId(NOVEMBER, 'acme')}?format="
    _, _, row, _ = csv_rows((await finance.get(f"{path}csv")).content)
    assert row[6:15] == ["2", "write_off", "exports", NOVEMBER, "", "-40", "40", "=1+1", "<b>ours</b>"]
    page = Page((await finance.get(f"{path}html")).text)
    assert [cell for cell in page.cells if cell.endswith(": <b>ours</b> (=1+1)")]
    assert "b" not in page.tags


async def test_a_write_off_is_proven_and_lines_without_units_are_refused(
    admin_harness: AdminHarness,
    finance: httpx.AsyncClient,
    auditor: httpx.AsyncClient,
    region: Region,
    people: People,
    check: Check,
) -> None:
    for kind in ("credit", "write_off", "write_off"):
        await people.adjusted(kind=kind, units=10)
    await booked(admin_harness, region)
    _, credit, *both = (await statement(finance, NOVEMBER))["lines"]
    number, kept = await newest(auditor)
    proofs = [await proof_of(auditor, line, number) for line in both]
    assert check(kept, [proofs[0]]) == f"PROVEN: -10 units of exports by acme in no region, {NOVEMBER}"
    for name, value in proofs[0]["line"].items():
        other = value - 1 if isinstance(value, int) else f"{value}x"
        assert not is_proven(check, kept, proofs[0] | {"line": proofs[0]["line"] | {name: other}}), name
    assert not is_proven(check, kept, proofs[0] | {"movements": proofs[1]["movements"]})
    assert not is_proven(check, kept, proofs[0] | {"movements": []})
    refused = await auditor.get(proof_path(credit))
    assert problem(refused) == (422, [("n", "billed")])
    assert credit["adjustment"]["path"] in refused.text
