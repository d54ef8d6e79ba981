"""The doctor's own checks, its catalogue, and how it puts results together."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from leasehold.doctor.catalogue import all_checks
from leasehold.doctor.examine import merged
from leasehold.doctor.facts import AccessFacts, ClockFacts, HealthFacts, ReleaseFacts, TlsFacts
from leasehold.doctor.rules import ACCESS_CHECK, CLOCK_CHECK, HEALTH_CHECK, RELEASE_CHECK, TLS_CHECK
from protocol.diagnosis.checks import CheckResult, CheckState, unknown_settings
from regional_agent.main import unknown_variables

DOCS = Path(__file__).parents[3] / "docs"
NOW = datetime(2026, 11, 18, 12, tzinfo=UTC)


def certificate(**left: float) -> TlsFacts:
    return TlsFacts(True, False, None, NOW + timedelta(**left), NOW)


@pytest.mark.parametrize(
    ("check", "facts", "state"),
    [
        (HEALTH_CHECK, HealthFacts(None, "ready", (), 3), "ok"),
        (HEALTH_CHECK, HealthFacts(None, "degraded", ("cut_off: it is",), 3), "warning"),
        (HEALTH_CHECK, HealthFacts(None, "not_ready", ("no_epoch: none",), 3), "failed"),
        (HEALTH_CHECK, HealthFacts("it does not answer", "", (), 0), "failed"),
        (TLS_CHECK, TlsFacts(False, True, None, None, NOW), "ok"),
        (TLS_CHECK, TlsFacts(False, False, None, None, NOW), "warning"),
        (TLS_CHECK, TlsFacts(True, False, "self-signed certificate", None, NOW), "failed"),
        (TLS_CHECK, certificate(days=60), "ok"),
        (TLS_CHECK, certificate(days=10), "warning"),
        (TLS_CHECK, certificate(days=1), "failed"),
        (ACCESS_CHECK, AccessFacts("T", 200, "", True), "ok"),
        (ACCESS_CHECK, AccessFacts("T", 200, "", False), "ok"),
        (ACCESS_CHECK, AccessFacts("T", 401, "", False), "unknown"),
        (ACCESS_CHECK, AccessFacts("T", 401, "unknown", True), "failed"),
        (ACCESS_CHECK, AccessFacts("T", 403, "lacks a scope", True), "failed"),
        (ACCESS_CHECK, AccessFacts("T", None, "", True), "unknown"),
        (ACCESS_CHECK, AccessFacts("T", 404, "", True), "unknown"),
        (RELEASE_CHECK, ReleaseFacts({}), "unknown"),
        (RELEASE_CHECK, ReleaseFacts({"a": "1", "b": "1"}), "ok"),
        (RELEASE_CHECK, ReleaseFacts({"a": "1", "b": "2"}), "warning"),
        (RELEASE_CHECK, ReleaseFacts({"a": "1", "b": "2", "c": "3"}), "failed"),
        (CLOCK_CHECK, ClockFacts(None), "unknown"),
        (CLOCK_CHECK, ClockFacts(timedelta(milliseconds=10)), "ok"),
        (CLOCK_CHECK, ClockFacts(timedelta(seconds=-3)), "warning"),
    ],
)
def test_what_only_an_outside_view_shows_is_judged(check: Any, facts: Any, state: str) -> None:
    assert check.judge(facts).state.value == state


def test_every_check_has_a_code_of_its_own_and_says_what_to_do() -> None:
    checks = all_checks()
    assert len(checks) > 35
    assert len({each.code for each in checks}) == len(checks)
    for each in checks:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", each.code)
        assert each.examines, each.code
        assert bool(each.remedy) or not (each.warns or each.fails), each.code


def test_every_place_in_the_guides_that_a_remedy_names_exists() -> None:
    named = {place for each in all_checks() for place in re.findall(r"docs/[\w/.#-]+\w", each.remedy)}
    assert len(named) > 5
    for place in named:
        path, _, anchor = place.partition("#")
        text = (DOCS.parent / path).read_text(encoding="utf-8")
        anchors = {_anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
        assert not anchor or anchor in anchors, place


def _anchor(heading: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def test_of_two_results_about_the_same_the_worse_known_one_is_kept() -> None:
    def result(state: CheckState, subject: str = "database") -> CheckResult:
        return CheckResult(check="c", subject=subject, state=state, found="", remedy="")

    states = [CheckState.UNKNOWN, CheckState.OK, CheckState.WARNING, CheckState.FAILED]
    for count in range(1, 5):
        assert merged(map(result, states[:count])) == [result(states[count - 1])]
        assert merged(map(result, reversed(states[:count]))) == [result(states[count - 1])]
    assert len(merged([result(CheckState.OK), result(CheckState.OK, "another")])) == 2


def test_a_variable_that_no_setting_reads_is_found_with_the_one_that_is_meant() -> None:
    environ = {
        "LEASEHOLD_AGENT_REGION": "us-east",
        "LEASEHOLD_AGENT_URL": "http://127.0.0.1:8411",
        "LEASEHOLD_AGENT_SERVICE_TOKEN_FILE": "/run/secrets/token",
        "LEASEHOLD_AGENT_DECISON_TIMEOUT_MS": "20",
        "LEASEHOLD_COORDINATOR_PORT": "8400",
        "PATH": "/bin",
    }
    [found] = unknown_variables(environ)
    assert found == ("LEASEHOLD_AGENT_DECISON_TIMEOUT_MS", "LEASEHOLD_AGENT_DECISION_TIMEOUT_MS")
    assert unknown_settings({"LEASEHOLD_AGENT_ZZZZZ": "1"}, "LEASEHOLD_AGENT_", ["LEASEHOLD_AGENT_REGION"]) == [
        ("LEASEHOLD_AGENT_ZZZZZ", None)
    ]
