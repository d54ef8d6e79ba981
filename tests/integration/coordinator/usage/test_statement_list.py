"""The list of statements has everybody who is billed in a period, as of one position."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.coordinator.admin_harness import (
    AdminHarness,
    Region,
    Used,
    problem,
    sealed,
)
from tests.integration.coordinator.spreadsheets import csv_rows
from tests.integration.coordinator.usage.test_finance_commands import Typed, address, said, typed
from tests.integration.coordinator.usage.test_statements import DAY, at, charge, close, region

__all__ = ["address", "region", "typed"]
pytestmark = pytest.mark.anyio
PATH = f"/v1/periods/{DAY}/statements"


async def listed(finance: httpx.AsyncClient, query: str = "") -> dict[str, Any]:
    answer = await finance.get(f"{PATH}?{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_list_has_the_statements_of_all_tenants(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient, region: Region
) -> None:
    """This includes tenants that only have an estimate, or nothing but a write-off, or use a quota that all share."""
    await admin.put("/v1/tenants/acme", json={"name": "Acme GmbH", "external_ids": {"stripe": "cus_7"}})
    for tenant, units in (("zeta", 3), ("Ähre", 2)):
        await region.use(f"mails:tenant={tenant}".replace("Ä", "%C3%84"), DAY, [Used(at("18T09:05"), units, "mail")])
    await sealed(admin_harness)
    first = await listed(finance)
    assert [(each["tenant"], each["billed"]) for each in first["data"]] == [("acme", 10), ("zeta", 3), ("Ähre", 2)]
    assert (first["data"][0]["name"], first["data"][0]["external_ids"]) == ("Acme GmbH", {"stripe": "cus_7"})
    await charge(admin_harness, region)
    await region.exchange("mails:tenant=zeta")
    await sealed(admin_harness)
    for each in (await listed(finance, "lines=true"))["data"]:
        statement = (await finance.get(each["path"])).json()
        its = {name: statement[name] for name in ("id", "tenant", "period", "billed", "is_final", "as_of", "lines")}
        assert {name: each[name] for name in its} == its
    assert (await listed(finance, f"as_of={first['as_of']}"))["data"] == first["data"]


async def test_pages_are_as_of_the_first(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    await region.use("mails:tenant=zeta", DAY, [Used(at("18T09:05"), 3, "mail")])
    await sealed(admin_harness)
    first = await listed(finance, "page_size=1")
    await region.use("mails:tenant=zeta", DAY, [Used(at("18T09:05"), 3, "mail")])
    await sealed(admin_harness)
    second = await listed(finance, f"page_size=1&page_after={first['page']['next']}")
    assert [each["billed"] for each in (first["data"] + second["data"])] == [10, 3]
    assert (second["as_of"], second["page"]["next"]) == (first["as_of"], None)
    assert problem(await finance.get(f"{PATH}?as_of=99")) == (422, [("as_of", "sealed")])
    assert problem(await finance.get("/v1/periods/2020-01/statements")) == (404, [])


async def test_statements_of_a_closed_period_are_final(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    await charge(admin_harness, region)
    await close(admin_harness)
    found = await listed(finance)
    [acme] = found["data"]
    assert (found["is_final"], acme["is_final"], acme["billed"]) == (True, True, 17)
    assert (await finance.get(acme["path"])).json()["is_final"]


async def test_all_statements_are_exported_as_rows_that_say_what_they_belong_to(
    finance: httpx.AsyncClient, region: Region, typed: Typed, tmp_path: Path
) -> None:
    await said(typed, "tenant", "set", "acme", "--name", "Acme GmbH", "--external-id", "lago=007")
    assert "lago=007" in await said(typed, "tenant", "show", "acme")
    table = (await said(typed, "statement", "list", DAY)).splitlines()
    assert table[1].split() == [
        "acme",
        "Acme",
        "GmbH",
        "lago=007",
        "10",
        "no",
        str((await listed(finance))["as_of"]),
    ]
    for name in ("all.csv", "all.ndjson", "all.xlsx"):
        assert "1 line of 1 statement" in await said(typed, "statement", "export", DAY, "-o", str(tmp_path / name))
    head, row = csv_rows((tmp_path / "all.csv").read_bytes())
    (line,) = (json.loads(text) for text in (tmp_path / "all.ndjson").read_text().splitlines())
    assert line == dict(zip(head, row, strict=True)) | {
        "as_of": int(row[4]),
        "n": 1,
        "units": 10,
        "adjusted": None,
        "document": None,
        "reason": None,
    }
    assert (line["tenant"], line["name"], line["external_ids"], line["is_final"]) == (
        "acme",
        "Acme GmbH",
        "lago=007",
        "false",
    )
    refused = await typed("statement", "export", DAY, "-o", str(tmp_path / "all.txt"))
    assert (refused.exit_code, ".csv, .ndjson or .xlsx" in refused.stderr) == (1, True)
    assert not await asyncio.to_thread((tmp_path / "all.txt").exists)
