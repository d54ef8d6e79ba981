"""The benchmark that plays traces on real processes: what it sends, and how it lays both runs side by side."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.allocation import rates
from benchmarks.allocation.beside import Books, Column, points_apart
from benchmarks.allocation.leased import Leased
from benchmarks.allocation.network import Network
from benchmarks.allocation.playing import ALLOWED, DENIED, NO_ANSWER, play
from benchmarks.allocation.run import play as play_virtually
from benchmarks.allocation.traces import Shape, Trace, rotating, trace, zipf
from benchmarks.allocation.wan import ROUND_TRIPS_MS, SHARED, Slow, allowances, cuts
from benchmarks.frame import drawn_by
from benchmarks.load import Server, http_is_whole, post
from benchmarks.open_loop import Moment

pytestmark = pytest.mark.anyio

SHORT = trace("short", Shape(2, zipf, 40, 0.4, speed=0.05), 1)
ASKED = Counter(
    {region: sum(units for tick in SHORT.ticks for each, units in tick if each == region) for region in (0, 1)}
)


@asynccontextmanager
async def agent(*answers: bytes) -> AsyncIterator[Server]:
    """Serve each request the next of the answers, and again from the first; an empty answer closes the connection."""
    told = iter(range(10**6))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            answer = answers[next(told) % len(answers)]
            if not answer:
                break
            writer.write(answer + b" X\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield Server("127.0.0.1", server.sockets[0].getsockname()[1], http_is_whole)


async def test_each_unit_is_a_request_at_its_region_and_each_answer_is_told_once() -> None:
    decided = Counter[tuple[int, bool]]()

    def note(region: int, _tick: int, _now_ms: int, is_admitted: bool) -> None:
        decided[region, is_admitted] += 1

    async with agent(ALLOWED) as first, agent(DENIED) as second:
        played = await play(SHORT, [first, second], post("/v1/check", b"{}"), note)
    assert decided == {(0, True): ASKED[0], (1, False): ASKED[1]}
    assert (played.admitted, played.others) == (ASKED[0], 0)
    assert len(played.late_ms) == len(SHORT.ticks)


async def test_what_is_not_answered_is_neither_admitted_nor_denied() -> None:
    async with agent(NO_ANSWER) as first, agent(b"HTTP/1.1 503") as second:
        played = await play(SHORT, [first, second], post("/v1/check", b"{}"), lambda *_: None)
    assert played.answers == {NO_ANSWER: ASKED[0], b"HTTP/1.1 503": ASKED[1]}
    assert played.others == sum(ASKED.values())


async def test_an_agent_that_is_not_there_answers_nobody() -> None:
    async with agent(ALLOWED) as gone:
        pass
    played = await play(SHORT, [gone, gone], post("/v1/check", b"{}"), lambda *_: None)
    assert played.answers == {NO_ANSWER: sum(ASKED.values())}


async def test_what_else_is_due_is_done_in_its_order() -> None:
    done: list[str] = []
    at = [Moment(9.0, lambda: done.append("after the end")), Moment(0.1, lambda: done.append("between"))]
    async with agent(ALLOWED) as one:
        await play(SHORT, [one, one], post("/v1/check", b"{}"), lambda *_: None, at)
    assert done == ["between", "after the end"]


def test_a_region_is_cut_off_by_stopping_its_relay_and_only_for_so_long() -> None:
    made = trace("cut", Slow(zipf, limit=100, length_s=3, cut_s=(1, 2), cut_region=2), 1)
    relay = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        begins, ends = cuts({"pids": {"relay-ap-south": relay.pid}}, made)
        assert (begins.after_s, ends.after_s) == (1, 2)
        begins.do()
        assert os.WIFSTOPPED(os.waitpid(relay.pid, os.WUNTRACED)[1])
        ends.do()
        assert os.WIFCONTINUED(os.waitpid(relay.pid, os.WCONTINUED)[1])
    finally:
        relay.communicate(b"\n")
    assert list(cuts({}, trace("no cut", Slow(zipf, limit=100, length_s=3), 1))) == []


def test_where_it_is_said_how_far_regions_are_nothing_is_lost() -> None:
    made = trace("far", Shape(3, zipf, 4_000, 4, round_trips_ms=(40, 100, 300)), 1)
    network = Network(made, "test")
    assert network.round_trips_ms == (40, 100, 300)
    arrived: list[int] = []
    for number in range(2_000):
        network.send(0, lambda number=number: arrived.append(number))  # type: ignore[misc]
    network.run_until(1_000)
    assert sorted(arrived) == list(range(2_000))
    assert play_virtually(made, Leased).over == 0


def test_a_slower_trace_asks_for_less_and_is_the_same_otherwise() -> None:
    units = {
        speed: sum(
            units for tick in trace("it", Shape(3, rotating(1), 10, 20, speed=speed), 1).ticks for _, units in tick
        )
        for speed in (1.0, 0.1)
    }
    assert units[1.0] == pytest.approx(100_000, rel=0.02)
    assert units[0.1] == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize("part", [0.2, 0.4, 1.0])
def test_each_allowance_is_spent_before_its_trace_ends(part: float) -> None:
    for name, shape in allowances(part).items():
        made = trace(name, shape, 1)
        assert made.round_trips_ms == ROUND_TRIPS_MS == [80, 140, 200]
        assert _asked(made) > 1.02 * shape.limit, name
    for name, shape in SHARED.items():
        assert _asked(trace(name, shape, 1)) > 0.5 * shape.limit * shape.length_s, name


def _asked(made: Trace) -> int:
    return sum(units for tick in made.ticks for _, units in tick)


def test_the_ledger_is_exact_to_the_unit_but_for_what_nobody_was_told_of() -> None:
    exact = Books(100, admitted=60, no_answer=0, consumed=50, suspense=10, outstanding=3, status="balanced")
    assert exact.is_exact
    assert not exact._replace(consumed=51).is_exact, "a unit that nobody was admitted for"
    assert exact._replace(consumed=51, no_answer=1).is_exact
    assert not exact._replace(consumed=49).is_exact, "a unit that is not booked"
    assert not exact._replace(consumed=49, no_answer=1).is_exact, "likewise: who was admitted was told so"
    assert not exact._replace(admitted=101, consumed=101, suspense=0).is_exact, "above the limit"
    assert not exact._replace(status="drift").is_exact


def test_points_are_between_medians() -> None:
    part, per_1000 = Column[float](float, 4, 100), Column[float](float, 2, 0.1)
    assert points_apart(part, [0.97], [0.9, 0.95, 1.0]) == pytest.approx(2)
    assert points_apart(per_1000, [0.0, 4.0, 1.0], [5.0]) == pytest.approx(-0.4)


def test_what_passed_is_measured_alike_whoever_admitted_it() -> None:
    made = trace("rate", SHARED["a rate: Zipf, steady"]._replace(length_s=5), 1)
    passed = rates.Passed(made)
    for tick in range(len(made.ticks)):
        passed.admit(0, made.limit // 50, tick)
    found = rates.measured(passed, None, 0)
    assert found.overshoot_s == 0
    assert found.conforming < 1
    passed.admit(1, 3 * made.limit, 100)
    assert rates.measured(passed, None, 0).overshoot_s == pytest.approx(2, abs=0.05)


def test_a_benchmark_shows_no_pictures_of_another_whose_name_begins_alike(tmp_path: Path) -> None:
    for name in ("allocation.json", "allocation-wan.json", "allocation-zipf.svg", "allocation-wan-zipf.svg"):
        (tmp_path / name).touch()
    assert [path.name for path in drawn_by("allocation", tmp_path)] == ["allocation-zipf.svg"]
    assert [path.name for path in drawn_by("allocation-wan", tmp_path)] == ["allocation-wan-zipf.svg"]
