"""Make every kind of kill once, under load; `./dev chaos --minutes N` does it for longer."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.balance import Line, settled_balance, sheet
from tests.chaos.killing import KINDS, kill
from tests.chaos.load import Load
from tests.chaos.pieces import Stack

pytestmark = pytest.mark.anyio


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    try:
        stack.begin()
        yield stack
    finally:
        stack.end()


@pytest.mark.extended
async def test_after_every_kind_of_kill_the_books_agree_with_the_journal(stack: Stack) -> None:
    load = Load(stack.agents_of, seed=1, pause_s=0.02)
    running = asyncio.create_task(load.run())
    kills = []
    for kind in KINDS:
        await asyncio.sleep(0.3)
        kills.append(await asyncio.to_thread(kill, stack, kind))
    load.stop()
    await running
    lines = await asyncio.to_thread(settled_balance, stack, load.journal)
    print(sheet(lines, load.journal, kills))
    assert [fault for line in lines for fault in line.faults()] == []
    assert all(line.admitted for line in lines)
    assert load.journal.answers[429], "the small allowance was to be exhausted"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (Line("t", 300, 301, 0, 301, 0), "301 admitted of 300"),
        (Line("t", 300, 250, 0, 290, 11), "290 + 11 booked of 300"),
        (Line("t", 300, 250, 0, 240, 9), "only 240 + 9 booked"),
        (Line("t", 300, 250, 5, 256, 0), "only 250 + 5 admitted"),
    ],
)
def test_the_faults_of_a_sheet_are_found(line: Line, what: str) -> None:
    assert any(what in fault for fault in line.faults())


def test_a_sheet_that_agrees_has_no_faults() -> None:
    assert Line("t", 300, 250, 5, 253, 47).faults() == []
