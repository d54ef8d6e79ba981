"""The quick faults of `./dev chaos --network`, on one stack: the others take stacks of their own, and minutes."""

from collections.abc import Iterator

import pytest

from tests.chaos.network.faults import FAULTS, PLAIN, Fault
from tests.chaos.network.stack import TARGET, DividedStack, running
from tests.chaos.network.trial import try_out

LASTS_S = 3.0
pytestmark = pytest.mark.xdist_group("network")  # they share a stack


@pytest.fixture(scope="module")
def stack() -> Iterator[DividedStack]:
    with running(PLAIN, seed=1) as stack:
        yield stack


@pytest.mark.parametrize("fault", [pytest.param(each, id=each.name) for each in FAULTS if each.is_quick])
def test_after_a_fault_of_the_network_the_books_agree(stack: DividedStack, fault: Fault) -> None:
    record = try_out(stack, fault, LASTS_S, seed=1)
    assert record.faults() == []
    assert record.answers[TARGET].statuses[200]
    assert record.line.consumed >= record.line.admitted - record.line.unaccounted
