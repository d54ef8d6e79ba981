"""The budget of a run of the tests: `short` ends within minutes; `full`, which CI gives, runs every test whole.

`./dev test` alone has the short budget. A run that selects its tests, by path, `-k` or `-m`, has the full one, because
somebody waits for just these; LEASEHOLD_TEST_BUDGET decides otherwise. A long test takes its size from here. A test
that has no smaller form is marked `extended`: a short run leaves it to CI, and says so at the end of its summary. Of a
parametrized test on a real server, a short run tries the first two cases.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import settings

VARIABLE = "LEASEHOLD_TEST_BUDGET"
SHORT, FULL = "short", "full"
PART_OF_EXAMPLES = 5  # a short run tries one of so many
SERVERS = {"postgres_server", "store_server"}  # fixtures
CASES_ON_SERVERS = 2
LEFT = pytest.StashKey[int]()
LEFT_BY_A_WORKER = "left_to_ci"

Size = TypeVar("Size", int, float, str)


def is_full() -> bool:
    """Return whether everything runs, as it does where nothing was decided: in a program that uses tests' parts."""
    return os.environ.get(VARIABLE, FULL) == FULL


def size(variable: str, full: Size, *, short: Size | None = None) -> Size:
    """Return the size of a long test, from a variable of its own or else from the budget of the run."""
    by_budget = full if is_full() or short is None else short
    given = os.environ.get(variable)
    return by_budget if given is None else type(full)(given)


def examples(full: int) -> int:
    """Return how many examples a property is tried with, of those that a full run tries."""
    return full if is_full() else max(1, full // PART_OF_EXAMPLES)


def cases(values: Iterable[object], *, short: int) -> list[Any]:
    """Return the cases of a parametrized test, of which a short run tries the first few."""
    whole = [each if isinstance(each, tuple) else (each,) for each in values]
    return [
        *(pytest.param(*each) for each in whole[:short]),
        *(pytest.param(*each, marks=pytest.mark.extended) for each in whole[short:]),
    ]


def pytest_configure(config: pytest.Config) -> None:
    """Decide on the budget for this process and for all that it starts, the workers included."""
    config.addinivalue_line("markers", "extended: has no smaller form, and needs the full budget")
    budget = os.environ.setdefault(VARIABLE, FULL if _selects_tests(config) else SHORT)
    if budget not in (SHORT, FULL):
        raise pytest.UsageError(f"{VARIABLE} is '{budget}', and can be '{SHORT}' or '{FULL}'.")
    # No test fails for the time that it took, because a busy machine is no fault of the code.
    usual = settings.get_profile("default").max_examples
    settings.register_profile("leasehold", deadline=None, max_examples=examples(usual))
    settings.load_profile("leasehold")


def _selects_tests(config: pytest.Config) -> bool:
    names_paths = config.args_source is pytest.Config.ArgsSource.ARGS
    return names_paths or bool(config.option.keyword or config.option.markexpr)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [] if is_full() else list(_left_to_ci(items))
    config.stash[LEFT] = len(left)
    if left:
        config.hook.pytest_deselected(items=left)
        deselected = set(left)
        items[:] = [item for item in items if item not in deselected]


def _left_to_ci(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield what a short run does not run: extended tests, and most cases of parametrized tests on real servers."""
    tried = Counter[str]()
    for item in items:
        if item.get_closest_marker("extended"):
            yield item
        elif SERVERS & set(getattr(item, "fixturenames", ())):
            name = item.nodeid.partition("[")[0]
            tried[name] += 1
            if tried[name] > CASES_ON_SERVERS:
                yield item


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the number from a worker of pytest-xdist: only workers collect, and only their parent prints."""
    output: dict[str, int] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[LEFT_BY_A_WORKER] = session.config.stash.get(LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output: dict[str, int] = getattr(node, "workeroutput", None) or {}  # a worker that crashed has none
    left = output.get(LEFT_BY_A_WORKER, 0)
    node.config.stash[LEFT] = max(left, node.config.stash.get(LEFT, 0))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(LEFT, 0):
        terminalreporter.write_line(
            f"{left} tests were left to CI, and long ones were shortened; all of them: {VARIABLE}={FULL} ./dev test"
        )
