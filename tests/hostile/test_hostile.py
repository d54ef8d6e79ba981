"""A hostile region with a valid token, or a hostile caller, runs next to honest load; `./dev hostile` does it for
longer.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.budget import size
from tests.chaos.pieces import Stack
from tests.hostile.trial import report, trial

pytestmark = pytest.mark.anyio
SECONDS = size("LEASEHOLD_HOSTILE_SECONDS", 8.0)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    try:
        stack.begin()
        yield stack
    finally:
        stack.end()


@pytest.mark.extended
async def test_honest_regions_do_not_notice_a_hostile_one(stack: Stack) -> None:
    verdict = await trial(stack, ["region"], SECONDS, seed=1)
    print(report(verdict))
    assert verdict.faults() == []
    assert verdict.honest.answers[200]
    assert verdict.quarantined


@pytest.mark.extended
async def test_honest_services_do_not_notice_a_hostile_caller(stack: Stack) -> None:
    verdict = await trial(stack, ["caller"], SECONDS, seed=1)
    print(report(verdict))
    assert verdict.faults() == []
    assert verdict.honest.answers[200]
