"""The script in docs/guides/auditing.md proves a line of a statement, and refuses any changed byte."""

import asyncio
import copy
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.coordinator.admin_harness import AdminHarness, Region, Used, problem, sealed
from tests.integration.coordinator.usage.test_statements import (
    DAY,
    MAILS,
    NEXT_DAY,
    at,
    charge,
    close,
    region,
    report_late,
    statement,
)

__all__ = ["region"]
pytestmark = pytest.mark.anyio

SMALL = "model=small"
PAGE = Path(__file__).parents[4] / "docs" / "guides" / "auditing.md"
Check = Callable[[str, list[dict[str, Any]]], str]


def script() -> str:
    (found,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def check() -> Check:
    names: dict[str, Any] = {"__name__": "check"}
    exec(script(), names)
    found: Check = names["check"]
    return found


def is_proven(check: Check, kept: str, *proofs: dict[str, Any]) -> bool:
    try:
        return check(kept, list(proofs)).startswith("PROVEN")
    except (SystemExit, Exception):
        return False


@pytest.fixture
async def auditor(admin_harness: AdminHarness) -> httpx.AsyncClient:
    return await admin_harness.caller("audit:read")


async def newest(auditor: httpx.AsyncClient) -> tuple[int, str]:
    seal = (await auditor.get("/v1/seals?page_size=1")).json()["data"][0]
    return seal["number"], seal["hash"]


def proof_path(line: dict[str, Any], **query: object) -> str:
    path, _, as_of = line["reports"].replace("/reports", "/proof").partition("?")
    return f"{path}?{'&'.join([as_of, *(f'{name}={value}' for name, value in query.items())])}"


async def proof_of(auditor: httpx.AsyncClient, line: dict[str, Any], seal: int) -> dict[str, Any]:
    answer = await auditor.get(proof_path(line, seal=seal))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
async def used(admin_harness: AdminHarness, region: Region) -> Region:
    """Book lines in several reports, under several seals, with usage of other tenants in between."""
    for minute in (5, 6):
        await region.use(MAILS, DAY, [Used(at(f"18T11:0{minute}"), minute, "mail"), Used(at("18T11:09"), 1, "ärger")])
        await region.use("mails:tenant=globex", DAY, [Used(at("18T11:05"), 2, "mail")])
        await sealed(admin_harness)
    return region


async def test_a_line_is_proven_and_any_changed_byte_refutes_it(
    finance: httpx.AsyncClient, auditor: httpx.AsyncClient, used: Region, check: Check
) -> None:
    [line] = (await statement(finance, DAY))["lines"]
    number, kept = await newest(auditor)
    proof = await proof_of(auditor, line, number)
    assert check(kept, [proof]) == f"PROVEN: {line['units']} units of mails by acme in eu-west, {DAY}"
    assert not is_proven(check, "0" * 64, proof)
    for changed in _with_one_leaf_changed(proof):
        assert not is_proven(check, kept, changed)
    text = msgspec.json.encode({name: proof[name] for name in proof if name != "page"})
    for place in range(0, len(text), 5):
        byte = b"1" if text[place : place + 1] != b"1" else b"2"
        forged = text[:place] + byte + text[place + 1 :]
        assert not _is_proven_text(check, kept, forged), forged[place - 30 : place + 30]


async def test_usage_by_label_leads_to_proven_transfers(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, auditor: httpx.AsyncClient, region: Region, check: Check
) -> None:
    """An invoice bills each model by itself: its units are those of the transfers that prove the statement's line."""
    large, small = (Used(at("18T11:05"), units, "mail", labels) for units, labels in ((7, "model=large"), (2, SMALL)))
    for used in ([large, small], [large]):
        await region.use(MAILS, DAY, used)
    await sealed(admin_harness)
    [line] = (await statement(finance, DAY))["lines"]
    question = "tenant=acme&quota=mails&group_by=labels.model&from=2026-11-18&to=2026-11-19"
    rows = (await finance.get(f"/v1/usage?{question}")).json()["data"]
    by_model = {row["dimensions"]["labels.model"]: row["units"] for row in rows}
    assert by_model == {"large": 14, "small": 2, None: 10}
    assert sum(by_model.values()) == line["units"]

    number, kept = await newest(auditor)
    proof = await proof_of(auditor, line, number)
    assert is_proven(check, kept, proof)
    sources = (await finance.get(line["reports"])).json()["data"]
    assert [each["position"] for each in sources] == [each["position"] for each in proof["reports"]]
    transferred = Counter[str | None]()
    for row in (row for report in proof["reports"] for row in report["billed"] if row[6] == "consumed"):
        transferred[{"model=large": "large", SMALL: "small"}.get(row[10].get("labels"))] += row[7]
    assert transferred == by_model
    assert not is_proven(check, kept, json.loads(json.dumps(proof).replace("model=large", SMALL)))


@pytest.mark.usefixtures("used")
async def test_a_seal_that_does_not_exist_is_refused_by_name(
    finance: httpx.AsyncClient, auditor: httpx.AsyncClient
) -> None:
    [line] = (await statement(finance, DAY))["lines"]
    number, _ = await newest(auditor)
    for seal in (0, number + 1, 9999):
        answer = await auditor.get(proof_path(line, seal=seal))
        assert problem(answer) == (422, [("seal", "known")])
        assert f"There is no seal {seal}: they are numbered from 1 to {number}" in answer.text


def _is_proven_text(check: Check, kept: str, text: bytes) -> bool:
    try:
        return is_proven(check, kept, json.loads(text))
    except ValueError:
        return False


def _with_one_leaf_changed(proof: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in _leaves({name: each for name, each in proof.items() if name != "page"}):
        changed = copy.deepcopy(proof)
        within: Any = changed
        for name in path[:-1]:
            within = within[name]
        value = within[path[-1]]
        within[path[-1]] = value + 1 if isinstance(value, int) else f"{value}x"
        yield changed


def _leaves(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    if not isinstance(value, dict | list):
        if value is not None or path[0] != "seals":
            yield path
        return
    for name, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(each, *path, name)


async def test_omitted_and_doubled_reports_are_found(
    finance: httpx.AsyncClient, auditor: httpx.AsyncClient, used: Region, check: Check
) -> None:
    [line] = (await statement(finance, DAY))["lines"]
    number, kept = await newest(auditor)
    proof = await proof_of(auditor, line, number)
    for part in ("reports", "seals"):
        for place in range(len(proof[part])):
            less = proof | {part: proof[part][:place] + proof[part][place + 1 :]}
            assert not is_proven(check, kept, less), (part, place)
        assert not is_proven(check, kept, proof | {part: [*proof[part], proof[part][0]]})
    pages = [(await auditor.get(proof_path(line, seal=number, page_size=2))).json()]
    while after := pages[-1]["page"]["next"]:
        pages.append((await auditor.get(proof_path(line, seal=number, page_size=2, page_after=after))).json())
    assert len(pages) > 1
    assert is_proven(check, kept, *pages)
    assert not is_proven(check, kept, *pages[1:])
    assert not is_proven(check, kept, *pages, pages[0])


async def test_late_usage_estimates_and_replacements_are_proven(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, auditor: httpx.AsyncClient, region: Region, check: Check
) -> None:
    await charge(admin_harness, region)
    await close(admin_harness)
    await report_late(region)
    await sealed(admin_harness)
    number, kept = await newest(auditor)
    kinds = []
    for period in (DAY, NEXT_DAY):
        for line in (await statement(finance, period))["lines"]:
            kinds.append(line["kind"])
            proof = await proof_of(auditor, line, number)
            assert is_proven(check, kept, proof), line
            more = copy.deepcopy(proof)
            more["line"]["units"] += 1
            assert not is_proven(check, kept, more)
    assert kinds == ["usage", "estimated", "late_usage", "replaced"]


async def test_the_script_runs_by_itself(
    finance: httpx.AsyncClient, auditor: httpx.AsyncClient, used: Region, tmp_path: Path
) -> None:
    [line] = (await statement(finance, DAY))["lines"]
    number, kept = await newest(auditor)
    (tmp_path / "check.py").write_text(script(), encoding="utf-8")
    (tmp_path / "proof.json").write_text(json.dumps(await proof_of(auditor, line, number)), encoding="utf-8")
    for seal, said in ((kept, (0, True)), ("0" * 64, (1, False))):
        command = [sys.executable, "-I", "-S", "check.py", seal, "proof.json"]
        process = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert (process.returncode, out.startswith(b"PROVEN")) == said


async def test_scopes_of_proofs(finance: httpx.AsyncClient, auditor: httpx.AsyncClient, used: Region) -> None:
    """Proofs contain whole reports, which include other tenants."""
    [line] = (await statement(finance, DAY))["lines"]
    assert problem(await finance.get(proof_path(line))) == (403, [])
    assert problem(await auditor.get(proof_path(line, seal="x"))) == (422, [("seal", "format")])
    assert problem(await auditor.get(proof_path(line).replace("lines/1", "lines/7"))) == (404, [])


@given(st.recursive(st.text() | st.integers(-(2**53), 2**53) | st.none(), lambda each: st.lists(each, max_size=3)))
def test_script_and_coordinator_write_json_alike(value: object) -> None:
    ours = msgspec.json.Encoder(order="sorted").encode(value)
    assert json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() == ours
