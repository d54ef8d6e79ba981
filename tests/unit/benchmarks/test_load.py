"""The benchmarks' own arithmetic, and how they tell that an answer has come whole."""

import asyncio
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.failures import decisions, in_time_of_10_000, latencies
from benchmarks.frame import Case, Figure, Load, Row, cells, compare, facts, figure, plain, publish
from benchmarks.load import RefusedError, Server, http_is_whole, post, resp, resp_is_whole
from benchmarks.open_loop import Moment, Sample, open_load, percentile_us
from benchmarks.picture import picture
from benchmarks.redis_benchmark import read

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "answer",
    [b":1\r\n", b"+OK\r\n", b"-ERR no\r\n", b"$-1\r\n", b"$3\r\nabc\r\n", b"*0\r\n", b"*2\r\n*1\r\n:1\r\n$2\r\nok\r\n"],
)
def test_an_answer_of_the_store_is_whole_at_its_last_byte(answer: bytes) -> None:
    assert resp_is_whole(answer)
    assert not any(resp_is_whole(answer[:end]) for end in range(len(answer)))


def test_an_answer_over_http_is_whole_at_its_last_byte() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nx: y\r\n\r\n{}"
    assert http_is_whole(answer)
    assert not any(http_is_whole(answer[:end]) for end in range(len(answer)))


def test_what_is_sent() -> None:
    assert resp("EVAL", b"\x00", "é") == b"*3\r\n$4\r\nEVAL\r\n$1\r\n\x00\r\n$2\r\n\xc3\xa9\r\n"
    assert post("/a", b"{}").endswith(b"Content-Length: 2\r\n\r\n{}")


def test_a_figure_is_the_median_with_its_range() -> None:
    assert figure([3, 1, 100]) == Figure(median=3, lowest=1, highest=100)


async def test_turns_alternate_the_first_round_is_not_counted_and_ratios_are_of_the_first() -> None:
    order: list[str] = []

    async def turn(name: str, speeds: list[float]) -> Load:
        order.append(name)
        return Load(speeds.pop(0), 1.0, 2.0, refused=1)

    slow, fast = [1.0, *[10.0] * 5], [1.0, *[40.0] * 5]
    rows = await compare({"slow": lambda: turn("slow", slow), "fast": lambda: turn("fast", fast)}, repeats=1)
    assert order == ["slow", "fast"] * 6
    assert [(row.name, row.per_second.median, row.of_reference, row.refused) for row in rows] == [
        ("slow", 10.0, 1.0, 5),
        ("fast", 40.0, 4.0, 5),
    ]


def test_a_benchmark_writes_its_section_of_the_page_anew_and_no_other(tmp_path: Path) -> None:
    page, one = tmp_path / "performance.md", Figure(1, 1, 1)
    rows = [Row("it", one, one, one, 0, 1.0)]
    publish("agent", {"checks": rows}, {"cores": 2}, page)
    publish("coordinator", {"lines": rows}, {"cores": 2}, page)
    publish("agent", {"requests": rows}, {"cores": 3}, page)
    text = page.read_text()
    assert "| lines |" in text
    assert "| requests |" in text
    assert "checks" not in text
    assert (text.count("## Agent"), text.count("## Coordinator"), text.count("# Performance")) == (1, 1, 1)


def test_a_case_has_columns_of_its_own() -> None:
    case = Case("it", {"part": figure([0.99941, 0.9, 1], digits=3), "reached": "yes", "messages": figure([7, 7], 0)})
    assert cells([case]) == (["part", "reached", "messages"], [["it", "0.999 (0.9 to 1)", "yes", "7"]])
    assert plain(case)["part"] == {"median": 0.999, "lowest": 0.9, "highest": 1}


async def test_calls_of_the_store_are_shown_where_somebody_counted_them() -> None:
    async def counted() -> Load:
        return Load(1.0, 1.0, 1.0, 0, store_calls=0.02)

    async def not_counted() -> Load:
        return Load(1.0, 1.0, 1.0, 0)

    headings, rows = cells(await compare({"by hand": not_counted, "agent": counted}, repeats=1))
    assert headings[-1] == "store calls"
    assert [row[-1] for row in rows] == ["", "0.0200"]
    assert cells(await compare({"by hand": not_counted}, repeats=1))[0][-1] == "ratio"


def test_what_is_no_throughput_has_its_reference_too() -> None:
    headings, rows = cells(facts({"10 policies": [1.0, 2.0, 3.0], "1,000 policies": [3.0]}))
    assert headings == ["median", "between", "ratio"]
    assert rows == [["10 policies", "2.0", "1.0 to 3.0", "1.000"], ["1,000 policies", "3.0", "3.0 to 3.0", "1.500"]]


def test_what_redis_benchmark_says() -> None:
    names = '"test","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","p99_latency_ms"'
    assert read(f'{names}\n"EVALSHA 1 2","104166.66","0.5","0.1","0.311","0.7","0.870"') == Load(
        104166.66, 311.0, 870.0, 0
    )


def test_redis_benchmark_measures_no_errors() -> None:
    with pytest.raises(RefusedError, match="NOSCRIPT"):
        read('Error from server: NOSCRIPT No matching script.\n"test","rps"\n"EVALSHA","5"')


async def test_a_request_that_is_due_while_the_server_stands_still_has_waited() -> None:
    """Coordinated omission: whoever asks only after an answer would see one slow request, and not all of them."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(100):
            if not stalled.is_set():
                stalled.set()
                await asyncio.sleep(0.2)
            writer.write(b"+OK\r\n")
        writer.close()
        await writer.wait_closed()

    stalled = asyncio.Event()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        samples = await open_load(
            Server("127.0.0.1", port, resp_is_whole), b"PING\r\n", per_second=200, seconds=0.4, connections=1
        )
    assert len(samples) == 80
    assert sum(sample.latency_us > 20_000 for sample in samples) > 20, "all that were due meanwhile"
    assert {sample.beginning for sample in samples} == {b"+OK\r\n"}


async def test_due_work_runs_beside_the_load_and_generator_pauses_are_reported() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(100):
            writer.write(b"+OK\r\n")
        writer.close()
        await writer.wait_closed()

    done: list[str] = []

    def pause() -> None:
        done.append("paused")
        until_s = time.perf_counter() + 0.05
        while time.perf_counter() < until_s:  # as who looks for garbage does not come round
            pass

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        samples = await open_load(
            Server("127.0.0.1", port, resp_is_whole),
            b"PING\r\n",
            per_second=200,
            seconds=0.3,
            at=[Moment(0.2, lambda: done.append("over")), Moment(0.1, pause)],
        )
    assert done == ["paused", "over"]
    longest = max(samples, key=lambda sample: sample.own_us)
    assert longest.latency_us >= longest.own_us > 30_000
    assert in_time_of_10_000([Sample(0, 60_000, b"", 55_000), Sample(0, 60_000, b"", 1_000)]) == 5_000


def test_a_percentile_is_the_latency_that_so_many_do_not_exceed() -> None:
    samples = [Sample(0.0, float(latency), b"") for latency in range(1, 1001)]
    assert [percentile_us(samples, part) for part in (0.5, 0.99, 0.999, 1.0)] == [500, 990, 999, 1000]


def test_a_picture_is_whole_and_names_its_lines() -> None:
    svg = picture(
        "Latency <of> a check", "a second", "ms", {"p50": [(1, 0.5), (2, 0.7)], "p99 & more": [(1, 9), (2, 800)]}
    )
    tree = ElementTree.fromstring(svg)
    texts = {each.text for each in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Latency <of> a check", "p50", "p99 & more", "0.1", "1,000", "ms", "a second"} <= texts
    lines = tree.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2


def test_an_outage_is_drawn_by_what_each_request_that_was_due_then_was_told() -> None:
    allowed = [Sample(0.001 * number, 1_000.0 * (1 + number), b"HTTP/1.1 200") for number in range(50)]
    closed = [Sample(0.05 + 0.01 * number, 6_000.0, b"HTTP/1.1 503") for number in range(5)]
    drawn = decisions([*allowed, *closed])
    assert {name: [round(height) for _, height in points] for name, points in drawn.items()} == {
        "allowed": [1000],
        "closed": [100],
    }
    assert latencies([*allowed, *closed])["latest"] == [(0.0, 50.0), (0.05, 6.0)]
