"""Statements list what is billed in lines that lead to their reports, and never change for a reader."""

from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from coordinator.exchange.expire_leases import expire_leases
from coordinator.usage.read_statement import MOST_LINES
from coordinator.usage.rules.sheet import restored
from coordinator.usage.rules.statement import StatementId
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

pytestmark = pytest.mark.anyio

DAY, NEXT_DAY = "2026-11-18", "2026-11-19"
ACME, MAILS = "exports:tenant=acme", "mails:tenant=acme"


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-{text}").replace(tzinfo=UTC)


@pytest.fixture
async def region(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> Region:
    """Use ten mails on the 18th, and lease seven more that are never accounted for."""
    await admin.put("/v1/limits", json=DOCUMENT)
    region = await open_region(admin_harness, admin, "eu-west")
    await region.use(MAILS, DAY, [Used(at("18T09:05"), 4, "mail"), Used(at("18T10:05"), 6, "mail")])
    await region.exchange(MAILS, demands=[{"quota": MAILS, "waiting": 7}])
    await region.use(ACME, "2026-11", [Used(at("18T09:05"), 5)])
    await sealed(admin_harness)
    return region


async def charge(admin_harness: AdminHarness, region: Region) -> None:
    """Let two people bill units that the region has not accounted for."""
    admin_harness.clock.move(minutes=5)
    async with admin_harness.owner.transaction():
        await expire_leases(admin_harness.owner, admin_harness.clock.now())
    one, other = await admin_harness.caller("adjust:propose"), await admin_harness.caller("adjust:approve")
    body = {"epoch": region.epoch, "quota": MAILS, "period": DAY, "kind": "charge", "reason": "it never came back"}
    proposed = await one.post("/v1/suspense:propose", json=body)
    assert proposed.status_code in (200, 201), proposed.text
    approved = await other.post(f"/v1/suspense/{proposed.json()['id']}:approve")
    assert approved.status_code == 200, approved.text


async def close(admin_harness: AdminHarness) -> None:
    admin_harness.clock.time = at("19T12:00")
    closer = await admin_harness.caller("period:close")
    for status in (202, 200):
        answer = await closer.post(f"/v1/periods/{DAY}:close", json={})
        assert answer.status_code == status, answer.text
        admin_harness.clock.move(minutes=20)


async def report_late(region: Region) -> None:
    lease = region.leases[MAILS, DAY]
    lease["consumed"] += 3
    line = {"minute": int(at("18T11:00").timestamp()) // 60, "dimensions": {"policy": "mail"}, "units": 3}
    await region.exchange(MAILS, frozen=[lease | {"lines": [line]}])


async def statement(finance: httpx.AsyncClient, period: str, query: str = "") -> dict[str, Any]:
    answer = await finance.get(f"/v1/periods/{period}/statement?tenant=acme{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def lines(found: dict[str, Any]) -> list[tuple[object, ...]]:
    names = ("n", "kind", "quota", "charge_period", "region", "units")
    return [tuple(line[name] for name in names) for line in found["lines"]]


async def test_a_statement_from_its_first_line_to_late_usage(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    first = await statement(finance, DAY)
    assert lines(first) == [(1, "usage", "mails", DAY, "eu-west", 10)]
    assert (first["is_final"], first["billed"], first["unaccounted"], first["root"]) == (False, 10, 7, None)

    await charge(admin_harness, region)
    assert lines(await statement(finance, DAY)) == lines(first)  # it contains only what is sealed
    await sealed(admin_harness)
    await region.exchange(ACME)
    await sealed(admin_harness)
    charged = [(1, "usage", "mails", DAY, "eu-west", 10), (2, "estimated", "mails", DAY, "eu-west", 7)]
    assert lines(await statement(finance, DAY)) == charged

    await close(admin_harness)
    final = await statement(finance, DAY)
    assert (lines(final), final["is_final"], final["billed"], final["unaccounted"]) == (charged, True, 17, 0)
    assert final["root"] == (await finance.get(f"/v1/periods/{DAY}")).json()["root"]

    await report_late(region)
    await sealed(admin_harness)
    assert await statement(finance, DAY) == final
    corrected = await statement(finance, NEXT_DAY)
    assert lines(corrected) == [
        (1, "late_usage", "mails", DAY, "eu-west", 3),
        (2, "replaced", "mails", DAY, "eu-west", -3),
    ]
    assert corrected["billed"] == 0  # the estimate was billed before
    assert (await statement(finance, DAY, f"&as_of={first['as_of']}")) == first


async def test_each_line_leads_to_its_reports_which_add_up_to_it(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    await region.use(MAILS, DAY, [Used(at("18T11:05"), 2, "mail"), Used(at("18T11:06"), 1, "mail")])
    await sealed(admin_harness)
    [line] = (await statement(finance, DAY))["lines"]
    path = line["reports"]
    answer = (await finance.get(path)).json()
    assert answer["line"] == line
    assert [each["units"] for each in answer["data"]] == [10, 3]
    for each in answer["data"]:
        row = await admin_harness.owner.fetchrow(
            "SELECT * FROM report WHERE (epoch, lane, seq) = ($1, $2, $3)", each["epoch"], each["lane"], each["seq"]
        )
        assert row is not None
        kept = (row["position"], row["body_hash"].hex(), row["head"].hex(), "eu-west")
        assert (each["position"], each["body_hash"], each["head"], each["region"]) == kept
    pages = [(await finance.get(f"{path}&page_size=1")).json()]
    pages.append((await finance.get(f"{path}&page_size=1&page_after={pages[0]['page']['next']}")).json())
    assert [row for page in pages for row in page["data"]] == answer["data"]
    assert pages[1]["page"] == {"next": None}

    await charge(admin_harness, region)
    await region.exchange(ACME)
    await sealed(admin_harness)
    [_, estimate] = (await statement(finance, DAY))["lines"]
    [source] = (await finance.get(estimate["reports"])).json()["data"]
    assert (source["units"], source["seq"], source["movement_id"] is None) == (7, None, False)
    # As of the earlier seal it has the same bytes as then.
    assert (await finance.get(path)).json() == answer


async def test_late_reports_change_no_issued_statement(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    as_of = (await statement(finance, DAY))["as_of"]
    for path in (
        f"/v1/periods/{DAY}/statement?tenant=acme&as_of={as_of}",
        f"/v1/periods/{DAY}/statement?tenant=acme&as_of={as_of}&format=csv",
        f"/v1/statements/{StatementId(DAY, 'acme')}?as_of={as_of}&format=html",
        f"/v1/statements/{StatementId(DAY, 'acme')}/lines/1/reports?as_of={as_of}",
    ):
        before = await finance.get(path)
        await region.use(MAILS, DAY, [Used(at("18T09:05") + timedelta(minutes=n), 1, "mail") for n in range(5)])
        await sealed(admin_harness)
        after = await finance.get(path)
        assert (after.status_code, after.content) == (200, before.content), path
        assert after.headers.get("ETag") == before.headers.get("ETag")


async def test_a_final_statement_may_be_kept_for_good(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    path = f"/v1/statements/{StatementId(DAY, 'acme')}"
    assert (await finance.get(path)).headers["Cache-Control"] == "private, no-cache"
    await charge(admin_harness, region)
    await close(admin_harness)
    final = await finance.get(path)
    assert final.headers["Cache-Control"] == "private, max-age=31536000, immutable"
    known = await finance.get(path, headers={"If-None-Match": final.headers["ETag"]})
    assert (known.status_code, known.content) == (304, b"")


class Page(HTMLParser):
    """Return the text of a printed page, and its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.cells, self._in = set[str](), list[str](), ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        self._in = tag

    def handle_data(self, data: str) -> None:
        if self._in == "td" and data.strip():
            self.cells.append(data)


async def test_a_statement_is_a_spreadsheet_and_a_printable_page(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient
) -> None:
    """This includes a tenant whose name would be a formula, or an element."""
    await admin.put("/v1/limits", json=DOCUMENT)
    region = await open_region(admin_harness, admin, "eu-west")
    tenant = '=HYPERLINK("x")<script>'
    await region.use("mails:tenant=%3DHYPERLINK%28%22x%22%29%3Cscript%3E", DAY, [Used(at("18T09:05"), 4, "mail")])
    await sealed(admin_harness)
    path = f"/v1/statements/{StatementId(DAY, tenant)}?format="
    sheet = await finance.get(f"{path}csv")
    assert sheet.headers["Content-Type"].startswith("text/csv")
    assert "attachment" in sheet.headers["Content-Disposition"]
    head, row, limit = csv_rows(sheet.content)
    assert head[:6] == ["tenant", "name", "external ids", "period", "as of", "is final"]
    assert head[6:15] == ["line", "kind", "quota", "used in", "region", "units", "adjusted", "document", "reason"]
    assert head[15:] == ["limit", "of", "beyond it", "from", "to", "plan"]
    assert row[:6] == limit[:6] == [tenant, "", "", DAY, row[4], "false"]
    row, limit = row[6:], limit[6:]
    assert row == ["1", "usage", "mails", DAY, "eu-west", "4", *[""] * 9]
    quota_key = "mails:tenant=%3DHYPERLINK%28%22x%22%29%3Cscript%3E"
    began = f"{admin_harness.clock.now() - timedelta(seconds=1):%Y-%m-%dT%H:%M:%SZ}"
    assert limit[1:3] + limit[8:] == [
        "limit",
        quota_key,
        "limits document 1",
        "100",
        "all regions together",
        "nothing",
        began,
        f"{NEXT_DAY}T00:00:00Z",
        "free",
    ]
    page = await finance.get(f"{path}html")
    assert page.headers["Content-Type"].startswith("text/html")
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
    shown = Page(page.text)
    assert shown.cells == ["Mails", "Usage, eu-west", "4", "Total", "4", "Mails", "plan free", shown.cells[7], "100"]
    assert shown.cells[7].startswith("18 Nov 2026")
    assert {"table", "thead", "style"} <= shown.tags
    assert not {"script", "link", "img", "iframe"} & shown.tags
    assert "size: A4" in page.text
    assert restored(tenant) == tenant


@pytest.mark.usefixtures("region")
async def test_the_trial_balance_is_a_spreadsheet_too(finance: httpx.AsyncClient) -> None:
    for name, first in {"trial-balance": "account", "reconciliation": "quota"}.items():
        found = (await finance.get(f"/v1/periods/{DAY}/{name}")).json()
        rows = csv_rows((await finance.get(f"/v1/periods/{DAY}/{name}?format=csv")).content)
        joined = rows[0].index(first)
        assert {row[0] for row in rows[1:]} == {DAY}
        page = Page((await finance.get(f"/v1/periods/{DAY}/{name}?format=html")).text)
        assert page.cells == [cell for row in rows[1:] for cell in row[joined:] if cell]
        assert len(rows) - 1 == len(found["accounts"] if name == "trial-balance" else found["quotas"])


@pytest.mark.usefixtures("region")
async def test_invalid_statements_are_refused(finance: httpx.AsyncClient) -> None:
    acme = StatementId(DAY, "acme")
    for path, expected in {
        f"periods/{DAY}/statement": (422, [("tenant", "required")]),
        f"periods/{DAY}/statement?tenant=acme&format=doc": (422, [("format", "enum")]),
        f"periods/{DAY}/statement?tenant=acme&as_of=99": (422, [("as_of", "sealed")]),
        f"periods/{DAY}/statement?tenant=nobody": (404, []),
        "periods/2020-01/statement?tenant=acme": (404, []),
        "statements/x": (404, []),
        f"statements/{acme}x": (404, []),
        f"statements/{acme}/lines/9/reports": (404, []),
        f"statements/{acme}/lines/0/reports": (404, []),
        f"statements/{acme}/lines/x/reports": (422, [("n", "format")]),
        f"statements/{acme}/lines/1/reports?page_after=x": (422, [("page_after", "format")]),
    }.items():
        assert problem(await finance.get(f"/v1/{path}")) == expected, path


MANY_USED = """
INSERT INTO usage_day (begins_at, period, charge_period, quota, name, tenant, region, units)
SELECT '2026-11-18Z', '2026-11-18', '2026-11-18', 'q' || n, 'q' || n, 'acme', 'eu-west', 1
FROM generate_series($1::int, $2::int) AS n
"""


async def test_a_statement_of_more_lines_than_are_served_is_refused_and_never_cut(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    """Lines of all kinds count together. There is one already."""
    path = f"/v1/statements/{StatementId(DAY, 'acme')}"
    await admin_harness.owner.execute(MANY_USED, 2, MOST_LINES)
    whole = (await finance.get(path)).json()
    assert (len(whole["lines"]), whole["billed"]) == (MOST_LINES, 10 + MOST_LINES - 1)
    await charge(admin_harness, region)
    await region.exchange(ACME)
    await sealed(admin_harness)
    for asked in (path, f"{path}?format=csv", f"{path}/lines/1/reports"):
        answer = await finance.get(asked)
        assert problem(answer) == (422, [("tenant", "at_most")])
        assert "more than 10,000 lines" in answer.text
    assert (await finance.get(f"{path}?as_of={whole['as_of']}")).json() == whole
    await admin_harness.owner.execute(MANY_USED, MOST_LINES + 1, MOST_LINES + 1)
    assert problem(await finance.get(f"{path}?as_of={whole['as_of']}")) == (422, [("tenant", "at_most")])
