"""A statement is paper that can be sent: looked at in a real browser, as PDF, and for a month of several calendars."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, ViewportSize, async_playwright

from coordinator.usage.rules.sheet import csv_file
from tests.integration.coordinator.admin_harness import (
    DOCUMENT,
    AdminHarness,
    Region,
    Used,
    open_region,
    problem,
    sealed,
)
from tests.integration.coordinator.spreadsheets import csv_rows
from tests.integration.coordinator.usage.test_statements import DAY, at
from tests.parts import part

pytestmark = pytest.mark.anyio
NOVEMBER = "2026-11"
QUOTAS: list[dict[str, Any]] = [
    {"name": "bulk_exports", "kind": "allowance", "limit": 5_000_000, "period": "month", "time_zone": "Europe/Berlin"},
    {"name": "calls", "kind": "allowance", "limit": 50_000, "period": "hour"},
    {"name": "mails", "kind": "allowance", "limit": 1000, "period": "day", "time_zone": "Asia/Kolkata"},
]
POLICIES = [
    {"name": quota["name"], "match": {"route": f"/v1/{quota['name']}"}, "by": ["tenant"], "quota": quota["name"]}
    for quota in QUOTAS
]
BERLIN, KOLKATA = "2026-11_Europe:Berlin_60", "2026-11-18_Asia:Kolkata_330"
WINDOW: ViewportSize = {"width": 800, "height": 1100}
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.fixture
async def region(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> Region:
    """Use three quotas, whose periods follow three calendars."""
    applied = await admin.put("/v1/limits", json=DOCUMENT | {"quotas": QUOTAS, "policies": POLICIES})
    assert applied.status_code in (200, 201), applied.text
    await admin.put(
        "/v1/tenants/acme",
        json={
            "name": "Müller & Söhne <GmbH>",
            "external_ids": {"stripe": "cus_7"},
            "address": ["Hafenstr. 1", "20457 Hamburg"],
            "time_zone": "Europe/Berlin",
        },
    )
    region = await open_region(admin_harness, admin, "eu-west")
    await region.use("bulk_exports:tenant=acme", BERLIN, [Used(at("18T09:05"), 1_234_567, "bulk_exports")])
    await region.use("mails:tenant=acme", KOLKATA, [Used(at("18T09:05"), 1000, "mails")])
    await region.use("calls:tenant=acme", "2026-11-18T12", [Used(at("18T12:05"), 7, "calls")])
    await sealed(admin_harness)
    return region


@pytest.fixture
def chromium() -> Path:
    return part("chromium")


@pytest.fixture
def soffice() -> Path:
    return part("libreoffice")


@pytest.fixture
async def browser_page(chromium: Path) -> AsyncIterator[Page]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=str(chromium), args=FLAGS)
        yield await browser.new_page(viewport=WINDOW)
        await browser.close()


# The cells of numbers whose text is on more than one line, and what stands beyond the edge of the page.
BROKEN = """() => [...document.querySelectorAll('.number')].filter(cell => {
    const range = document.createRange(); range.selectNodeContents(cell);
    return new Set([...range.getClientRects()].map(rect => Math.round(rect.top))).size > 1;
}).map(cell => cell.textContent).concat(
    document.documentElement.scrollWidth > document.documentElement.clientWidth ? ['too wide'] : [])"""


@pytest.mark.extended
@pytest.mark.usefixtures("region")
async def test_no_number_of_a_page_is_broken_in_a_browser(
    finance: httpx.AsyncClient, browser_page: Page, tmp_path: Path
) -> None:
    """This holds on the screen and on paper, and numbers stay whole in a window of a telephone's width too."""
    for path in (
        f"periods/{BERLIN}/statement?tenant=acme&",
        f"tenants/acme/statements/{NOVEMBER}?",
        f"periods/{BERLIN}/trial-balance?",
        f"periods/{BERLIN}/reconciliation?",
    ):
        page = await finance.get(f"/v1/{path}format=html")
        assert page.status_code == 200, page.text
        await browser_page.set_content(page.text)
        for medium in ("screen", "print"):
            await browser_page.emulate_media(media=medium)
            broken = await browser_page.evaluate(BROKEN)
            assert [each for each in broken if each != "too wide" or "reconciliation" not in path] == [], (path, medium)
        await browser_page.set_viewport_size({"width": 360, "height": 800})
        await browser_page.emulate_media(media="screen")
        assert {*await browser_page.evaluate(BROKEN)} <= {"too wide"}, path
        await browser_page.set_viewport_size(WINDOW)
        picture = await browser_page.screenshot(path=str(tmp_path / "page.png"), full_page=True)
        assert len(picture) > 1000


@pytest.mark.extended
@pytest.mark.usefixtures("region")
async def test_a_statement_can_be_sent(finance: httpx.AsyncClient, browser_page: Page) -> None:
    page = await finance.get(f"/v1/periods/{BERLIN}/statement?tenant=acme&format=html")
    await browser_page.set_content(page.text)
    text = await browser_page.inner_text("body")
    for shown in (
        *("Müller & Söhne <GmbH>", "Hafenstr. 1", "stripe: cus_7", "Usage statement", "Bulk exports"),
        *("1 Nov 2026 to 30 Nov 2026", "Europe/Berlin", "1,234,567", "5,000,000", "Preliminary", "Total"),
    ):
        assert shown in text, (shown, text)
    assert "write_off" not in text
    assert "<GmbH>" not in page.text
    pdf = await browser_page.pdf(format="A4")
    assert pdf.count(b"/Type /Page\n") == 1


@pytest.mark.extended
@pytest.mark.usefixtures("pango", "region")
async def test_a_statement_is_a_pdf_of_the_same_bytes_each_time(finance: httpx.AsyncClient) -> None:
    path = f"/v1/periods/{BERLIN}/statement?tenant=acme&format=pdf"
    first, second = await finance.get(path), await finance.get(path)
    assert first.status_code == 200, first.text
    assert first.headers["Content-Type"] == "application/pdf"
    assert first.content.startswith(b"%PDF-")
    assert (first.content, first.headers["ETag"]) == (second.content, second.headers["ETag"])


async def test_a_month_has_all_its_periods_of_all_calendars(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    path = f"/v1/tenants/acme/statements/{NOVEMBER}"
    found = (await finance.get(path)).json()
    assert [(each["period"], each["billed"]) for each in found["periods"]] == [
        (BERLIN, 1_234_567),
        (KOLKATA, 1000),
        ("2026-11-18T12", 7),
    ]
    of_periods = [(await finance.get(each["path"])).json()["billed"] for each in found["periods"]]
    assert found["billed"] == sum(of_periods)
    assert [(each["kind"], each["quota"], each["units"]) for each in found["lines"]] == [
        ("usage", "bulk_exports", 1_234_567),
        ("usage", "calls", 7),
        ("usage", "mails", 1000),
    ]
    assert (found["is_final"], found["month"]) == (False, NOVEMBER)
    admin_harness.clock.move(hours=1)
    await region.use("calls:tenant=acme", "2026-11-18T13", [Used(at("18T13:05"), 3, "calls")])
    await sealed(admin_harness)
    later = (await finance.get(path)).json()
    assert (later["billed"], len(later["periods"]), later["lines"][1]["units"]) == (found["billed"] + 3, 4, 10)
    assert (await finance.get(f"{path}?as_of={found['as_of']}")).json()["billed"] == found["billed"]
    head, *rows = csv_rows((await finance.get(f"{path}?format=csv")).content)
    assert [row[head.index("units")] for row in rows] == ["1234567", "10", "1000"]
    for wrong in ("2026-13", "2026-1", "x", "2026-10"):  # the last has nothing of this tenant
        assert problem(await finance.get(f"/v1/tenants/acme/statements/{wrong}")) == (404, [])


# --- spreadsheets -----------------------------------------------------------------------------------------------------

NAMES = ["007", "1e5", "2026-11-05", "Müller-Söhne", "=1+1", "k_5585574065970e78", "MAR1", "12/2026"]


async def in_libreoffice(soffice: Path, file: Path) -> list[list[str]]:
    """Open a file in LibreOffice as a double click does, and return the cells as it shows them.

    On a screen its dialog takes UTF-8 from the mark of a CSV file. Without a screen there is no dialog, and it is told.
    """
    profile = f"-env:UserInstallation={(file.parent / 'profile').as_uri()}"
    words = [profile, "--headless", "--convert-to", "csv:Text - txt - csv (StarCalc):44,34,76,1,,0,false,true,false"]
    if file.suffix == ".csv":
        words.append("--infilter=CSV:44,34,76,1")
    out = file.parent / "out"
    process = await asyncio.create_subprocess_exec(
        soffice, *words, "--outdir", out, file, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, said
    return csv_rows(b"\xef\xbb\xbf" + (out / f"{file.stem}.csv").read_bytes())


@pytest.mark.extended
async def test_libreoffice_shows_the_cells_as_they_are(
    soffice: Path, admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient, tmp_path: Path
) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    region = await open_region(admin_harness, admin, "eu-west")
    await admin.put("/v1/tenants/007", json={"name": "007"})
    await region.use("mails:tenant=007", DAY, [Used(at("18T09:05"), 4, "mail")])
    await sealed(admin_harness)
    answers = {
        each: await finance.get(f"/v1/periods/{DAY}/statement?tenant=007&format={each}") for each in ("csv", "xlsx")
    }
    wanted = csv_rows(answers["csv"].content)
    for suffix, answer in answers.items():
        file = tmp_path / f"statement.{suffix}"
        file.write_bytes(answer.content)
        assert file.suffix != ".csv" or answer.content.startswith(b"\xef\xbb\xbf")
        shown = await in_libreoffice(soffice, file)
        assert [row[:12] for row in shown[:2]] == [row[:12] for row in wanted[:2]], suffix
    assert wanted[1][:4] == ["007", "007", "", DAY]
    file = tmp_path / "names.csv"
    file.write_bytes(csv_file([["tenant", "n"], *zip(NAMES, range(len(NAMES)), strict=True)]))
    assert await in_libreoffice(soffice, file) == [["tenant", "n"], *[[name, str(n)] for n, name in enumerate(NAMES)]]
