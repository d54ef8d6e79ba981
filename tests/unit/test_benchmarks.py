"""The benchmarks' own arithmetic, and how they tell that an answer has come whole."""

from pathlib import Path

import pytest

from benchmarks.frame import Figure, Load, Row, compare, figure, publish
from benchmarks.load import http_is_whole, post, resp, resp_is_whole

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
