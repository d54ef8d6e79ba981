"""The quick faults of `./dev chaos --network`, on one stack: the others take stacks of their own, and minutes."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.chaos.network import table
from tests.chaos.network.alerts import Alerts, names_of_alerts, quickened, watching
from tests.chaos.network.faults import FAULTS, PLAIN, Fault
from tests.chaos.network.memory import ADDRESS_SPACE, bounded_memory, kind_of_bound
from tests.chaos.network.stack import TARGET, DividedStack, running
from tests.chaos.network.trial import try_out

LASTS_S = 3.0
pytestmark = pytest.mark.xdist_group("network")  # they share a stack


@pytest.fixture(scope="module")
def stack() -> Iterator[DividedStack]:
    with running(PLAIN, seed=1) as stack:
        yield stack


@pytest.fixture(scope="module")
def alerts(stack: DividedStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alerts]:
    with watching(stack, tmp_path_factory.mktemp("alerts") / "prometheus") as alerts:
        yield alerts


@pytest.mark.extended
@pytest.mark.parametrize("fault", [pytest.param(each, id=each.name) for each in FAULTS if each.is_quick])
def test_after_a_fault_of_the_network_the_books_agree(stack: DividedStack, alerts: Alerts, fault: Fault) -> None:
    record = try_out(stack, alerts, fault, LASTS_S, seed=1)
    assert record.faults() == []
    assert record.answers[TARGET].statuses[200]
    assert record.line.consumed >= record.line.admitted - record.line.unaccounted


def test_each_fault_has_an_alert_or_a_reason_why_none_is_due() -> None:
    assert {fault.alert for fault in FAULTS if fault.alert} <= names_of_alerts()
    assert not [fault.name for fault in FAULTS if bool(fault.alert) == bool(fault.no_alert)]


def test_the_published_page_names_each_alert_once_as_fired_or_as_not() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    rows, rest = text.partition(table.BEGIN)[2].partition(table.END)[0].split(table.NEVER_FIRED)
    fired, others = (set(re.findall(r"\bLeasehold\w+", part)) for part in (rows, rest))
    unnamed = names_of_alerts() - fired - others
    assert not unnamed, f"add to docs/explanation/faults.md that only unit tests fire {unnamed}, or make a fault"
    assert fired | others == names_of_alerts()
    assert not fired & others
    assert all(fault.title in rows for fault in FAULTS)


def test_a_process_that_needs_more_memory_than_it_may_have_ends() -> None:
    """In a control group the kernel kills it."""
    program = "import sys; print(flush=True); sys.stdin.readline(); bytes([1]) * (64 << 20)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        with bounded_memory(process.pid, spare_bytes=8 << 20):
            process.stdin.close()
            status = process.wait(60)
    assert status == (1 if kind_of_bound() == ADDRESS_SPACE else -signal.SIGKILL)


def test_durations_of_rules_are_divided_and_thresholds_stay() -> None:
    rule = "expr: rate(a[5m] offset 1h) > 600\nfor: 90s"
    assert quickened(rule) == "expr: rate(a[5000ms] offset 60000ms) > 600\nfor: 1500ms"
