"""A coordinator examines its own database, and an owner's connection sees what it may not see."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from coordinator.background import background_jobs
from coordinator.database.engine import open_database
from coordinator.diagnosis.examine import examine_coordinator, read_and_examine_database
from coordinator.diagnosis.rules import LEDGER_CHECKS, SCHEMA_CHECKS, SERVER_CHECKS
from coordinator.jobs import Job
from coordinator.settings import CoordinatorSettings
from protocol.clock import SystemClock
from protocol.diagnosis.checks import CheckResult, UnknownSetting
from tests.conftest import free_port, restricted
from tests.integration.coordinator.admin_harness import AdminHarness
from tests.integration.coordinator.fixtures import connected
from web.diagnosis.self_diagnosis import SelfDiagnosis

pytestmark = pytest.mark.anyio


def by_code(found: Iterable[CheckResult]) -> dict[str, CheckResult]:
    return {each.check: each for each in found}


async def examined(url: str, unknown: tuple[UnknownSetting, ...] = (), **changed: Any) -> dict[str, CheckResult]:
    settings = CoordinatorSettings(database_url=SecretStr(url), **changed)
    async with open_database(url, 2) as database:
        jobs = background_jobs(settings, SystemClock())
        return by_code(await examine_coordinator(database, settings, unknown, jobs, SystemClock()))


async def test_a_coordinator_knows_its_role_its_schema_and_how_long_a_commit_takes(database: str) -> None:
    found = await examined(restricted(database), (UnknownSetting("LEASEHOLD_COORDINATOR_X", None),))
    expected = {
        "database_role": "ok",
        "database_schema": "ok",
        "database_commits": "ok",
        "database_clock": "ok",
        "database_tls": "ok",
        "jobs": "ok",
        "database_durability": "failed",  # test servers do not wait for disks
        "database_replication": "warning",
        "seals": "warning",
        "verification": "warning",
        "coordinator_settings": "warning",
    }
    assert {code: found[code].state.value for code in expected} == expected
    assert found["database_role"].found.startswith("coordinator may append")
    assert "younger than a day" in found["database_size"].found


async def test_a_coordinator_that_connects_as_the_owner_has_failed(database: str) -> None:
    found = await examined(database)
    assert found["database_role"].state.value == "failed"
    assert "superuser" in found["database_role"].found


async def test_a_guard_that_somebody_dropped_is_named(database: str) -> None:
    async with connected(database) as owner:
        await owner.execute("DROP TRIGGER seal_is_append_only ON seal")
    found = await examined(restricted(database))
    assert found["database_role"].state.value == "failed"
    assert "seal_is_append_only" in found["database_role"].found


async def test_a_job_that_has_work_and_that_nobody_does_is_named(database: str) -> None:
    async def idle(_: object) -> None:
        return

    jobs = [Job("busy", 1, idle), Job("idle", 1, idle, has_work="false"), Job("patient", 1, idle, at_most_s=9_000)]
    async with connected(database) as owner:
        await owner.executemany(
            "INSERT INTO job VALUES ($1, clock_timestamp() - interval '1 hour')", [(job.name,) for job in jobs]
        )
    url = restricted(database)
    async with open_database(url, 2) as pool:
        settings = CoordinatorSettings(database_url=SecretStr(url))
        found = by_code(await examine_coordinator(pool, settings, (), jobs, SystemClock()))
    assert found["jobs"].state.value == "failed"
    assert "busy" in found["jobs"].found
    assert "idle" not in found["jobs"].found
    assert "patient" not in found["jobs"].found


async def test_an_owner_sees_which_standbys_confirm_and_asks_about_the_coordinators_role(database: str) -> None:
    found = by_code(await read_and_examine_database(database, SystemClock(), 10))
    assert found["database_role"].found.startswith("leasehold_coordinator may append")
    assert found["database_clock"].subject == "this machine"
    assert found["jobs"].state.value == "ok"
    assert "installation" not in found


async def test_a_database_that_does_not_answer_leaves_its_checks_unknown() -> None:
    found = await examined(f"postgresql://a:b@127.0.0.1:{free_port()}/c")
    unknown = {code for code, each in found.items() if each.state.value == "unknown"}
    assert {each.code for each in SERVER_CHECKS} <= unknown
    assert {each.code for each in SCHEMA_CHECKS} <= unknown
    assert {each.code for each in LEDGER_CHECKS} <= unknown
    assert found["coordinator_log"].state.value == "ok"


async def test_the_diagnosis_is_for_auditors(admin_harness: AdminHarness) -> None:
    auditor = await admin_harness.caller("audit:read")
    answer = await auditor.get("/v1/diagnosis")
    assert answer.status_code == 200
    assert answer.json()["checked_at"]
    assert {each["check"] for each in answer.json()["checks"]} >= {"database_role", "jobs", "coordinator_settings"}
    reader = await admin_harness.caller("quota:read")
    assert (await reader.get("/v1/diagnosis")).status_code == 403


async def test_a_problem_is_logged_when_it_begins_and_when_it_ends(database: str) -> None:
    url = restricted(database)
    async with open_database(url, 2) as pool:

        async def examine() -> list[CheckResult]:
            settings = CoordinatorSettings(database_url=SecretStr(url), installation=name)
            jobs = background_jobs(settings, SystemClock())
            found = await examine_coordinator(pool, settings, (), jobs, SystemClock())
            return [each for each in found if each.check == "coordinator_installation_name"]

        diagnosis, name = SelfDiagnosis(examine, SystemClock()), ""
        with capture_logs() as logs:
            await diagnosis.look()
            await diagnosis.look()
            name = "production"
            await diagnosis.look()
    assert [each["event"] for each in logs] == ["check found a problem", "check ok again"]
    assert logs[0]["check"] == "coordinator_installation_name"
    assert logs[0]["remedy"]


async def test_checks_that_fail_leave_the_last_report_and_a_line_in_the_log() -> None:
    async def examine() -> list[CheckResult]:
        raise OSError

    with capture_logs() as logs:
        async with asyncio.timeout(60):
            report = await SelfDiagnosis(examine, SystemClock()).look()
    assert (report.checked_at, report.checks) == (None, [])
    assert [each["event"] for each in logs] == ["checks could not run"]
