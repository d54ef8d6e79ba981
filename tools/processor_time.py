"""A pytest plugin that shows where the processor time of the tests goes: `./dev test -p tools.processor_time`.

Wall time says little on a machine that others use. Counted is the time of each worker and of all the processes below
it, servers included, between one report and the next, so that nothing which runs in the background is left out.
"""

import os
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest

PROPERTY = "processor_s"
ROWS = int(os.environ.get("PROCESSOR_TIME_ROWS", "40"))
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessorTime:
    """Measures in workers, and adds up in the process that prints the summary."""

    def __init__(self) -> None:
        self._seen_s = 0.0
        self._by_test: defaultdict[str, float] = defaultdict(float)
        self._by_file: defaultdict[tuple[str, str], float] = defaultdict(float)

    def pytest_runtestloop(self) -> None:
        self._seen_s = time_of_family(os.getpid())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = time_of_family(os.getpid())
        report.user_properties.append((PROPERTY, now_s - self._seen_s))
        self._seen_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spent_s = sum(float(str(value)) for name, value in report.user_properties if name == PROPERTY)
        self._by_test[report.nodeid] += spent_s
        self._by_file[report.nodeid.partition("::")[0], report.when] += spent_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: defaultdict[str, float] = defaultdict(float)
        for (file, _), spent_s in self._by_file.items():
            files[file] += spent_s
        show = terminalreporter.write_line
        show(f"processor time: {sum(files.values()):.1f} s; setup, call and teardown of the costliest files:")
        for file, spent_s in _costliest(files):
            phases = "".join(f"{self._by_file[file, when]:7.1f}" for when in ("setup", "call", "teardown"))
            show(f"{spent_s:7.1f}{phases}  {file}")
        show("and of the costliest tests:")
        for test, spent_s in _costliest(self._by_test):
            show(f"{spent_s:7.1f}  {test}")


def _costliest(spent: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(spent.items(), key=lambda each: -each[1])[:ROWS]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTime())


def time_of_family(pid: int) -> float:
    """Return the processor time of a process, of those that it has waited for, and of all that live below it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [each for task in Path(f"/proc/{pid}/task").iterdir() for each in _children(task)]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it has ended
    ticks = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return ticks / TICKS_PER_S + sum(map(time_of_family, children))


def _children(task: Path) -> list[int]:
    try:
        return [int(each) for each in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
