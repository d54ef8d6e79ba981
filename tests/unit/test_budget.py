"""A short run and CI together run every test, and each guarantee has a test in a short run."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import budget, parts

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
from tests.budget import cases, examples, size

@pytest.mark.parametrize("number", range(size("NUMBERS", 3, short=1)))
def test_numbers(number): pass

@pytest.mark.parametrize(("letter", "number"), cases([("a", 1), ("b", 2), ("c", 3)], short=1))
def test_cases(letter, number): pass

@pytest.mark.extended
def test_extended(): pass

@pytest.fixture
def store_server(): pass

@pytest.mark.parametrize("case", "xyz")
def test_servers(case, store_server): pass
"""
SHORT = {"test_numbers[0]", "test_cases[a-1]", "test_servers[x]", "test_servers[y]"}
OTHERS = {
    "test_numbers[1]",
    "test_numbers[2]",
    "test_cases[b-2]",
    "test_cases[c-3]",
    "test_extended",
    "test_servers[z]",
}
WHOLE = SHORT | OTHERS
LEFT = "4 tests were left to CI, and long ones were shortened; all of them: LEASEHOLD_TEST_BUDGET=full ./dev test\n"


def run(directory: Path, *arguments: str, **environment: str) -> tuple[set[str], str]:
    """Run the tests above; return the names of those that passed, and all that was printed."""
    (directory / "pytest.ini").write_text("[pytest]\naddopts = -v -p no:schemathesis --strict-markers\ntestpaths = .\n")
    (directory / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "tools.run_tests", "-p", "tests.budget", *arguments]
    inherited = {name: value for name, value in os.environ.items() if name != budget.VARIABLE}
    environ = inherited | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, check=False)
    passed = re.finditer(r"test_it\.py::(\S+) PASSED|PASSED test_it\.py::(\S+)", done.stdout)
    return {found[1] or found[2] for found in passed}, done.stdout + done.stderr


@pytest.mark.parametrize("workers", budget.cases(["-n1", "-n0"], short=1))
def test_a_short_run_says_how_many_tests_it_left(tmp_path: Path, workers: str) -> None:
    ran, printed = run(tmp_path, workers)
    assert ran == SHORT, printed
    assert LEFT in printed


SELECTING = [["test_it.py"], ["-k", "test"], ["-m", "extended or not extended"]]


@pytest.mark.parametrize("arguments", budget.cases(SELECTING, short=1), ids=["path", "-k", "-m"])
def test_a_run_that_selects_its_tests_runs_them_whole(tmp_path: Path, arguments: list[str]) -> None:
    ran, printed = run(tmp_path, "-n0", *arguments)
    assert ran == WHOLE, printed
    assert "left to CI" not in printed


def test_a_full_run_runs_every_test_and_a_size_of_its_own_has_precedence(tmp_path: Path) -> None:
    ran, printed = run(tmp_path, "-n1", LEASEHOLD_TEST_BUDGET="full", NUMBERS="2")
    assert ran == WHOLE - {"test_numbers[2]"}, printed
    assert "left to CI" not in printed


def test_an_unknown_budget_is_refused(tmp_path: Path) -> None:
    ran, printed = run(tmp_path, "-n0", LEASEHOLD_TEST_BUDGET="long")
    assert not ran
    assert "LEASEHOLD_TEST_BUDGET is 'long', and can be 'short' or 'full'." in printed


def test_ci_has_the_full_budget_and_the_same_command(tmp_path: Path) -> None:
    """A budget from outside does not make CI leave anything out."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "dev").write_text('#!/bin/sh\necho "$@" $LEASEHOLD_TEST_BUDGET\n')
    (tmp_path / "dev").chmod(0o755)
    environ = os.environ | {budget.VARIABLE: budget.SHORT}
    done = subprocess.run([tmp_path / ".ci" / "run"], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:2] == ["check full", "test full"]


def test_properties_are_tried_with_a_part_of_their_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for each in (budget.SHORT, budget.FULL):
        monkeypatch.setenv(budget.VARIABLE, each)
        found[each] = [budget.examples(number) for number in (100, 3)]
    assert found == {"short": [20, 1], "full": [100, 3]}


def test_a_test_of_a_short_run_fetches_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is fetched over the network at the first use, and may take minutes."""
    monkeypatch.setenv(budget.VARIABLE, budget.SHORT)
    with pytest.raises(pytest.fail.Exception, match="mark the test `extended`"):
        parts.part("redis")


# At least one test of each guarantee runs by default, on real servers where the guarantee is theirs.
GUARANTEES = {
    "no unit is admitted twice or lost": [
        "tests/integration/regional_agent/leasing/test_exchange_loop.py::test_three_regions_at_once_admit_the_limit_to_the_unit",
        "tests/integration/regional_agent/leasing/test_exchange_loop.py::test_a_lost_reply_loses_nothing_and_books_nothing_twice",
        "tests/integration/regional_agent/http/test_workers.py::test_a_worker_killed_under_load_is_replaced_and_no_unit_is_booked_twice",
        "tests/integration/regional_agent/store_outage/test_journal.py::test_a_killed_agent_reports_its_journal_at_its_next_start",
        "tests/integration/coordinator/state_machine/test_state_machine.py::test_no_sequence_of_steps_breaks_an_invariant",
        "tests/simulation/test_simulation.py::test_a_seed_holds_all_invariants",
        "tests/simulation/test_ledger_model.py::test_the_model_and_postgres_answer_alike_and_hold_the_same",
    ],
    "a store that lost data is fenced": [
        "tests/integration/regional_agent/leasing/test_exchange_loop.py::test_a_restored_store_gets_another_epoch_and_its_evidence_is_kept",
        "tests/integration/regional_agent/store/test_sentinels.py::test_a_primary_in_a_later_epoch_is_another_one_for_the_agent",
        "tests/integration/regional_agent/store/test_replicas.py::test_a_failover_with_all_data_books_each_unit_and_holds_none_in_suspense",
        "tests/integration/regional_agent/cluster/test_single_cluster.py::test_a_moved_slot_begins_another_incarnation_of_its_cell_only",
    ],
    "usage reaches an invoice exactly once": [
        "tests/integration/coordinator/usage/test_changes.py::test_a_worker_that_is_killed_again_and_again_bills_each_unit_once",
        "tests/end_to_end/test_show.py::test_one_operation_sent_ten_times_at_once_is_charged_once",
    ],
    "a closed month never changes": [
        "tests/integration/coordinator/periods/test_close.py::test_the_database_refuses_every_change_to_a_closed_month_even_of_the_owner",
    ],
    "what was forged is found": [
        "tests/integration/coordinator/proof/test_forged.py::test_a_forged_row_is_found_at_its_place",
        "tests/integration/coordinator/archives/test_archives.py::test_what_stays_in_the_database_is_still_proven",
    ],
    "a token opens what its scopes say": [
        "tests/integration/coordinator/http/test_openapi.py::test_calls_of_any_shape_are_answered_as_documented",
        "tests/end_to_end/test_show.py::test_bad_calls_get_the_right_refusal_and_book_nothing",
    ],
    "a coordinator that goes away denies no check": [
        "tests/integration/several_coordinators/test_failover.py::test_no_check_is_denied_and_no_unit_lost_when_a_coordinator_goes_away",
        "tests/integration/recovery/test_failover.py::test_a_synchronous_standby_takes_over_without_losing_a_unit",
    ],
}


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_each_guarantee_has_a_test_in_a_short_run(guarantee: str) -> None:
    for file, _, name in (each.partition("::") for each in GUARANTEES[guarantee]):
        body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        [function] = [node for node in functions if node.name == name]
        assert "pytest.mark.extended" not in map(ast.unparse, function.decorator_list), name
