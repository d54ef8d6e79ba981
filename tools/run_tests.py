"""Run pytest, and run the few tests that failed in parallel once more, alone, as CPython's regrtest does.

    python -m tools.run_tests [--no-rerun] [PYTEST ARGUMENTS]

A test that fails beside others and passes alone shows a bound that is too short for a busy machine. It is printed as a
warning, and the exit status is 0 only if each test that failed passes alone. Nothing is run again if more than `MOST`
tests failed, if the run was not parallel, or if it was interrupted.

The tests alone run in a new process (`exec`), which has neither modules nor threads of the first. The last line is
pytest's summary for both runs: each test is counted once.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

import pytest

MOST = 5  # as many may be a matter of load; more are a fault
BEFORE = "LEASEHOLD_TESTS_BEFORE"  # how the parallel run is handed to the process that runs its failures alone
FAILURES = ("failed", "error")
SHOWN = (*FAILURES, "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings")


class Outcomes:
    """A plugin that keeps what pytest's own summary was written from."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        self.is_complete = False
        self.is_parallel = False

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
    ) -> None:
        stats = terminalreporter.stats
        failed = {_node_id(report.nodeid) for name in FAILURES for report in stats.get(name, ())}
        for name in SHOWN:
            self.counts[name] = sum(_node_id(each.nodeid or "") not in failed for each in stats.get(name, ()))
        self.failed = sorted(failed)
        self.is_complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        self.is_parallel = config.pluginmanager.hasplugin("dsession")

    def are_worth_another_run(self) -> bool:
        """Tell whether the failures may be a matter of load. A file that cannot be imported is not."""
        are_tests = all("::" in each for each in self.failed)
        return self.is_complete and self.is_parallel and are_tests and 0 < len(self.failed) <= MOST


def main(arguments: Sequence[str]) -> int:
    if before := os.environ.pop(BEFORE, None):
        return _run_alone(**json.loads(before))
    started_s, outcomes = time.time(), Outcomes()
    status = pytest.main([each for each in arguments if each != "--no-rerun"], plugins=[outcomes])
    if outcomes.are_worth_another_run() and "--no-rerun" not in arguments:
        _say(f"\nrunning again, alone: {len(outcomes.failed)} of the tests failed in parallel")
        _continue_alone({"counts": outcomes.counts, "failed": outcomes.failed, "started_s": started_s})
    return int(status)


def _continue_alone(before: dict[str, object]) -> NoReturn:
    os.environ[BEFORE] = json.dumps(before)
    os.execv(sys.executable, [sys.executable, "-m", __spec__.name])


def _run_alone(counts: dict[str, int], failed: list[str], started_s: float) -> int:
    outcomes = Outcomes()
    status = pytest.main(["-n", "0", *failed], plugins=[outcomes])
    if not outcomes.is_complete:
        return int(status)
    if passed := [each for each in failed if each not in outcomes.failed]:
        _say("\nWARNING: failed in parallel, passed alone:", *[f"  {each}" for each in passed])
    if outcomes.failed:
        _say("\nfailed in parallel, and failed alone:", *[f"  {each}" for each in outcomes.failed])
    counts = {name: counts[name] + outcomes.counts[name] for name in SHOWN} | {"failed": len(outcomes.failed)}
    _say("", _summary(counts, time.time() - started_s))
    return int(status)


def _node_id(reported: str) -> str:
    """Return the test's name without the `@group` that xdist appends to it; parameters may hold an @ of their own."""
    return reported.rpartition("@")[0] if reported.rfind("@") > reported.rfind("]") else reported


def _summary(counts: dict[str, int], seconds: float) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in SHOWN if counts.get(name)) + f" in {seconds:.2f}s"


def _say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
