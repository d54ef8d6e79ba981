"""Finance gets reported usage, every unit once, grouped as requested."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from tests.integration.coordinator.admin_harness import (
    DOCUMENT,
    AdminHarness,
    Region,
    Used,
    open_region,
    problem,
    sealed,
)

pytestmark = pytest.mark.anyio

ACME, GLOBEX = "exports:tenant=acme", "exports:tenant=globex"
MAILS = "mails:tenant=acme"


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-{text}").replace(tzinfo=UTC)


@pytest.fixture
async def booked(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> dict[str, Region]:
    """Book 100 units: exports of two tenants and mails of one, from two regions, on the 17th and the 18th."""
    await admin.put("/v1/limits", json=DOCUMENT)
    regions = {name: await open_region(admin_harness, admin, name) for name in ("eu-west", "us-east")}
    await regions["eu-west"].use(ACME, "2026-11", [Used(at("17T22:30"), 10), Used(at("17T23:30"), 20)])
    await regions["us-east"].use(ACME, "2026-11", [Used(at("18T09:05"), 5), Used(at("18T09:59"), 15, "bulk")])
    await regions["us-east"].use(GLOBEX, "2026-11", [Used(at("18T10:00"), 40)])
    await regions["eu-west"].use(MAILS, "2026-11-18", [Used(at("18T11:00"), 10, "mail")])
    return regions


async def usage(finance: httpx.AsyncClient, query: str = "") -> list[dict[str, Any]]:
    answer = await finance.get(f"/v1/usage?{query}")
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()["data"]
    return rows


def by(rows: Sequence[dict[str, Any]], *names: str) -> dict[object, int]:
    return {tuple(row["dimensions"][name] for name in names): row["units"] for row in rows}


@pytest.mark.usefixtures("booked")
async def test_usage_without_parameters_is_the_sum_of_the_month(finance: httpx.AsyncClient) -> None:
    answer = (await finance.get("/v1/usage")).json()
    month = {"from": "2026-11-01T00:00:00Z", "to": "2026-12-01T00:00:00Z"}
    assert answer["data"] == [month | {"dimensions": {}, "units": 100}]
    assert answer["as_of"] == 8
    assert answer["page"] == {"next": None}


@pytest.mark.usefixtures("booked")
async def test_usage_is_grouped_as_requested(finance: httpx.AsyncClient) -> None:
    assert by(await usage(finance, "group_by=region"), "region") == {("eu-west",): 40, ("us-east",): 60}
    assert by(await usage(finance, "group_by=tenant"), "tenant") == {("acme",): 60, ("globex",): 40}
    assert by(await usage(finance, "group_by=quota"), "quota") == {("exports",): 90, ("mails",): 10}
    assert by(await usage(finance, "group_by=policy"), "policy") == {("bulk",): 15, ("export",): 75, ("mail",): 10}
    both = {("acme", "eu-west"): 40, ("acme", "us-east"): 20, ("globex", "us-east"): 40}
    for query in ("group_by=tenant&group_by=region", "group_by=tenant,region", "group_by=region,tenant,region"):
        assert by(await usage(finance, query), "tenant", "region") == both


@pytest.mark.usefixtures("booked")
async def test_usage_is_filtered_as_requested(finance: httpx.AsyncClient) -> None:
    async def units(query: str) -> int:
        return sum(row["units"] for row in await usage(finance, query))

    assert await units("tenant=acme") == 60
    assert await units("tenant=acme&tenant=globex") == 100
    assert await units("tenant=acme&quota=exports&region=us-east") == 20
    assert await units("policy=bulk&policy=mail") == 25
    assert await units("tenant=nobody") == 0
    assert await units("tenant=acme' OR '1'='1") == 0


@pytest.mark.extended
@pytest.mark.usefixtures("booked")
async def test_pieces_follow_the_calendar_of_the_zone(finance: httpx.AsyncClient) -> None:
    def days(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
        return [(row["from"], row["units"]) for row in rows]

    in_utc = await usage(finance, "granularity=P1D")
    assert days(in_utc) == [("2026-11-17T00:00:00Z", 30), ("2026-11-18T00:00:00Z", 70)]
    in_berlin = await usage(finance, "granularity=P1D&time_zone=Europe/Berlin")
    assert days(in_berlin) == [("2026-11-16T23:00:00Z", 10), ("2026-11-17T23:00:00Z", 90)]
    in_kathmandu = await usage(finance, "granularity=PT1H&time_zone=Asia/Kathmandu&region=us-east")
    assert days(in_kathmandu) == [("2026-11-18T08:15:00Z", 5), ("2026-11-18T09:15:00Z", 55)]
    by_minute = await usage(finance, "granularity=PT1M&tenant=globex")
    assert [(row["from"], row["to"]) for row in by_minute] == [("2026-11-18T10:00:00Z", "2026-11-18T10:01:00Z")]
    assert days(await usage(finance, "granularity=P1M&from=2026-01-01")) == [("2026-11-01T00:00:00Z", 100)]


@pytest.mark.usefixtures("booked")
async def test_a_range_is_half_open_and_parts_add_up(finance: httpx.AsyncClient) -> None:
    first = await usage(finance, "to=2026-11-18T09:59:00Z")
    second = await usage(finance, "from=2026-11-18T09:59:00Z")
    assert [row["units"] for row in first + second] == [35, 65]
    assert second[0]["from"] == "2026-11-18T09:59:00Z"
    day = await usage(finance, "from=2026-11-18&to=2026-11-19&time_zone=Europe/Berlin")
    assert [(row["from"], row["to"], row["units"]) for row in day] == [
        ("2026-11-17T23:00:00Z", "2026-11-18T23:00:00Z", 90)
    ]


async def test_a_range_without_usage_is_empty(finance: httpx.AsyncClient) -> None:
    answer = (await finance.get("/v1/usage?granularity=PT1H&group_by=tenant")).json()
    coverage = {"is_known": False, "unaccounted": 0}
    assert answer == {"data": [], "as_of": 0, "coverage": coverage, "page": {"next": None}}


async def test_unknown_quotas_gaps_and_zeros_are_distinguished(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, booked: dict[str, Region]
) -> None:
    async def answer(query: str) -> tuple[bool, int, list[int]]:
        found = (await finance.get(f"/v1/usage?{query}")).json()
        told = found["coverage"]
        return told["is_known"], told["unaccounted"], [row["units"] for row in found["data"]]

    # Unknown: the ledger never had the quota, so there is no zero either.
    for unknown in ("tenant=nobody", "quota=reports", "from=2025-01-01&to=2025-02-01", "period=2026-10"):
        for zeros in ("", "&zeros=true", "&zeros=true&granularity=P1D&group_by=tenant"):
            assert await answer(unknown + zeros) == (False, 0, [])
    # A gap: a region holds units, some of which may be used by now.
    await booked["us-east"].exchange(GLOBEX, demands=[{"quota": GLOBEX, "waiting": 7}])
    held = await admin_harness.owner.fetchval("SELECT sum(outstanding) FROM lease WHERE quota = $1", GLOBEX)
    assert await answer("tenant=globex&counted_as=overage") == (True, held, [])
    assert held >= 7
    # A zero: nothing was used, and no region holds units.
    lease = booked["us-east"].leases[GLOBEX, "2026-11"]
    await booked["us-east"].exchange(GLOBEX, frozen=[lease | {"returned": lease["granted"] - lease["consumed"]}])
    assert await answer("tenant=globex&counted_as=overage") == (True, 0, [])
    assert await answer("tenant=globex&counted_as=overage&zeros=true") == (True, 0, [0])
    assert await answer("tenant=globex&zeros=true&granularity=P1D&from=2026-11-17&to=2026-11-20") == (
        True,
        0,
        [0, 40, 0],
    )


async def test_pending_reports_are_named_for_the_query(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, booked: dict[str, Region]
) -> None:
    async def unaccounted(query: str) -> int:
        return int((await finance.get(f"/v1/usage?{query}")).json()["coverage"]["unaccounted"])

    for region, quota in (("eu-west", ACME), ("us-east", ACME), ("eu-west", MAILS)):
        await booked[region].exchange(quota, demands=[{"quota": quota, "waiting": 7}])
    await admin_harness.owner.execute(
        "UPDATE lease SET outstanding = outstanding - 3, suspense = 3 WHERE quota = $1", ACME
    )
    waiting = {
        (row["quota"], row["region"]): int(row["units"])
        for row in await admin_harness.owner.fetch("SELECT quota, region, outstanding + suspense AS units FROM lease")
    }
    assert await unaccounted("") == sum(waiting.values())
    assert await unaccounted("region=eu-west") == waiting[ACME, "eu-west"] + waiting[MAILS, "eu-west"]
    assert await unaccounted("quota=mails") == await unaccounted("period=2026-11-18") == waiting[MAILS, "eu-west"]
    assert await unaccounted(f"quota_key={ACME}&charge_period=2026-11&region=us-east") == waiting[ACME, "us-east"]
    assert await unaccounted("quota=mails&to=2026-11-18") == 0


@pytest.mark.extended
@pytest.mark.usefixtures("booked")
async def test_pieces_without_usage_are_returned_on_request(finance: httpx.AsyncClient) -> None:
    rows = await usage(finance, "granularity=P1D&group_by=tenant,region&from=2026-11-17&to=2026-11-19&zeros=true")
    assert [(row["from"][8:10], *row["dimensions"].values(), row["units"]) for row in rows] == [
        ("17", "acme", "eu-west", 30),
        ("17", "acme", "us-east", 0),
        ("17", "globex", "us-east", 0),
        ("18", "acme", "eu-west", 10),
        ("18", "acme", "us-east", 20),
        ("18", "globex", "us-east", 40),
    ]
    pages = [(await finance.get("/v1/usage?granularity=P1D&zeros=true&page_size=20")).json()]
    pages.append(
        (
            await finance.get(
                f"/v1/usage?granularity=P1D&zeros=true&page_size=20&page_after={pages[0]['page']['next']}"
            )
        ).json()
    )
    assert [len(page["data"]) for page in pages] == [20, 10]
    assert [page["coverage"] is None for page in pages] == [False, True]


async def test_pages_are_of_one_moment(finance: httpx.AsyncClient, booked: dict[str, Region]) -> None:
    question = "/v1/usage?granularity=PT1H&group_by=tenant,region"
    whole = (await finance.get(question)).json()
    pages = [(await finance.get(f"{question}&page_size=2")).json()]
    await booked["us-east"].use(GLOBEX, "2026-11", [Used(at("17T00:30"), 7), Used(at("18T10:30"), 3)])
    while after := pages[-1]["page"]["next"]:
        pages.append((await finance.get(f"{question}&page_size=2&page_after={after}")).json())
    assert [len(page["data"]) for page in pages] == [2, 2, 1]
    assert [row for page in pages for row in page["data"]] == whole["data"]
    assert {page["as_of"] for page in pages} == {whole["as_of"]}
    assert sum(row["units"] for row in (await finance.get(question)).json()["data"]) == 110


@pytest.mark.extended
@pytest.mark.usefixtures("booked")
async def test_a_page_belongs_to_its_query(finance: httpx.AsyncClient) -> None:
    after = (await finance.get("/v1/usage?group_by=tenant&page_size=1")).json()["page"]["next"]
    for other in ("group_by=region", "group_by=tenant&tenant=acme", "group_by=tenant&granularity=P1D"):
        answer = await finance.get(f"/v1/usage?{other}&page_after={after}")
        assert problem(answer) == (422, [("page_after", "question")])


@pytest.mark.extended
async def test_an_unchanged_answer_is_not_sent_again(finance: httpx.AsyncClient, booked: dict[str, Region]) -> None:
    first = await finance.get("/v1/usage")
    known = {"If-None-Match": first.headers["ETag"]}
    again = await finance.get("/v1/usage", headers=known)
    assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", first.headers["ETag"])
    await booked["eu-west"].use(ACME, "2026-11", [Used(at("18T11:00"), 1)])
    assert (await finance.get("/v1/usage", headers=known)).status_code == 200


async def test_every_fault_of_a_query_is_named(finance: httpx.AsyncClient) -> None:
    for query, expected in {
        "from=yesterday": [("from", "format")],
        "to=2026-11-18T10:00:00": [("to", "format")],
        "from=2026-11-19&to=2026-11-18": [("to", "after")],
        "from=2026-11-19&to=2026-11-19": [("to", "after")],
        "time_zone=Mars": [("time_zone", "format")],
        "granularity=PT5M": [("granularity", "enum")],
        "granularity=PT1M&from=2020-01-01": [("granularity", "bound")],
        "group_by=color": [("group_by", "enum")],
        "group_by=tenant,,region": [("group_by", "enum")],
        "group_by=labels.Model": [("group_by", "enum")],
        "labels.Model=large": [("labels", "name")],
        "labels.model=": [("labels", "length")],
        "labels=large": [("labels", "name")],
        "as_of=3": [("as_of", "sealed")],
        "as_of=soon": [("as_of", "format")],
        "tenant=%00": [("tenant", "text")],
        "tenant=": [("tenant", "min_length")],
        "zeros=1": [("zeros", "format")],
        "page_size=0": [("page_size", "minimum")],
        "page_after=x": [("page_after", "format")],
        "group-by=tenant": [("group-by", "unknown")],
        "region=nowhere&tenant=acme": [("region", "known")],
        "policy=exprot": [("policy", "known")],
        "route_class=hevay&region=us_east": [("region", "known"), ("route_class", "known")],
        "degraded=none": [("degraded", "enum")],
        "counted_as=nonsense": [("counted_as", "enum")],
        "period=november": [("period", "format")],
        "charge_period=2026-13": [("charge_period", "format")],
        "api_key=9489729697506728": [("api_key", "pattern")],
        "quota_key=exports": [("quota_key", "format")],
        "from=x&to=y&time_zone=z&limit=1": [
            ("from", "format"),
            ("limit", "unknown"),
            ("time_zone", "format"),
            ("to", "format"),
        ],
    }.items():
        assert problem(await finance.get(f"/v1/usage?{query}")) == (422, expected), query


async def test_usage_is_told_apart_by_labels(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, booked: dict[str, Region]
) -> None:
    lines = [
        Used(at("18T09:05"), 3, labels="model=large,tier=gold"),
        Used(at("18T09:05"), 4, labels="model=small"),
        Used(at("18T09:06"), 5, labels="model=10%25%2C gpt"),
    ]
    await booked["eu-west"].use(GLOBEX, "2026-11", lines)
    of_models = {("large",): 3, ("small",): 4, ("10%, gpt",): 5, (None,): 40}
    for source in ("", "granularity=PT1M", "granularity=P1D", "granularity=P1D&time_zone=Europe/Berlin"):
        rows = await usage(finance, f"tenant=globex&group_by=labels.model&from=2026-11-18&{source}")
        assert by([row for row in rows if row["units"] < 40], "labels.model") | {(None,): 40} == of_models, source
        assert sum(row["units"] for row in rows) == 52
    for query, units in {
        "labels.model=large": 3,
        "labels.model=large&labels.model=small": 7,
        "labels.model=large&labels.tier=gold": 3,
        "labels.model=small&labels.tier=gold": 0,
        "labels.model=10%25%2C%20gpt": 5,
        "labels.model=large&tenant=acme": 0,
        "tenant=globex": 52,
    }.items():
        assert sum(row["units"] for row in await usage(finance, query)) == units, query
    await sealed(admin_harness)
    answer = (await finance.get("/v1/usage?labels.model=larg")).json()
    assert answer["coverage"]["is_known"] is False, "a misspelt label is no proven zero"


async def test_an_unknown_name_is_refused_with_those_that_there_are(
    finance: httpx.AsyncClient, booked: dict[str, Region]
) -> None:
    (fault,) = (await finance.get("/v1/usage?region=eu-wets")).json()["invalid_parameters"]
    assert fault["reason"] == f"There is no region 'eu-wets'. There are: {', '.join(sorted(booked))}."
    assert (await finance.get("/v1/usage?route_class=*")).status_code == 200, "requests in no class"


@pytest.mark.extended
async def test_a_key_that_used_nothing_is_no_proven_zero(finance: httpx.AsyncClient, booked: dict[str, Region]) -> None:
    """No list says which keys there are, so a misspelt one is like one that used nothing."""
    assert booked
    answer = (await finance.get("/v1/usage?api_key=k_0123456789abcdef&from=2026-11-18&to=2026-11-19")).json()
    assert (answer["data"], answer["coverage"]["is_known"] and not answer["coverage"]["unaccounted"]) == ([], False)


@pytest.mark.extended
async def test_a_quota_key_need_not_be_percent_encoded(finance: httpx.AsyncClient, booked: dict[str, Region]) -> None:
    await booked["eu-west"].use("exports:tenant=M%C3%BCller%2C%20S%C3%B6hne", "2026-11", [Used(at("18T10:00"), 3)])
    for spelling in ("exports:tenant=M%C3%BCller%2C%20S%C3%B6hne", "exports:tenant=Müller%2C Söhne"):
        found = (await finance.get("/v1/usage", params={"quota_key": spelling})).json()["data"]
        assert [row["units"] for row in found] == [3], spelling
