"""Lines over two axes, as SVG: enough to see a latency grow, and no library for it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from benchmarks.frame import RESULTS

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 960, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 290, 50, 50
# A page may be light or dark; the lines' own colours are readable on both.
STYLE = """<style>
.ground { fill: #ffffff } .grid { stroke: #d0d7de } .tick { stroke: #57606a } text { fill: #24292f }
@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117 } .grid { stroke: #30363d } .tick { stroke: #9198a1 } text { fill: #e6edf3 }
}
</style>"""
COLOURS = ("#1f6feb", "#d1242f", "#2da44e", "#bf8700", "#8250df", "#768390")
TICKS_ACROSS = 8


def picture(title: str, across: str, up: str, lines: Mapping[str, Points]) -> str:
    """`up` is drawn to the logarithm: a stall is a thousand times what is usual."""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points if y > 0]
    lowest, highest = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    frame = _Frame(min(xs), max(xs), lowest, max(highest, lowest + 1))
    drawn = [*frame.axes(across, up), *(part for each in enumerate(lines.items()) for part in frame.line(*each))]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    named = f'<text x="{LEFT}" y="24" font-size="16">{escape(title)}</text>'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" class="ground"/>'
    return "\n".join([head, STYLE, ground, named, *drawn, "</svg>", ""])


def save(name: str, svg: str) -> Path:
    """Write the picture beside the results; the page shows those that begin with the benchmark's name."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.svg"
    path.write_text(svg)
    return path


class _Frame:
    def __init__(self, first: float, last: float, lowest: int, highest: int) -> None:
        self._first, self._last = first, last if last > first else first + 1
        self._lowest, self._highest = lowest, highest

    def x(self, value: float) -> float:
        return LEFT + (value - self._first) / (self._last - self._first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        part = (math.log10(value) - self._lowest) / (self._highest - self._lowest)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)

    def axes(self, across: str, up: str) -> Iterator[str]:
        bottom = HEIGHT - BOTTOM
        for power in range(self._lowest, self._highest + 1):
            y = self.y(10.0**power)
            yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="grid"/>'
            yield _text(LEFT - 8, y + 4, f"{10.0**power:,g}", "end")
        decimals = 0 if self._last - self._first >= 5 * TICKS_ACROSS else 1
        for each in range(TICKS_ACROSS + 1):
            value = self._first + each * (self._last - self._first) / TICKS_ACROSS
            x = self.x(value)
            yield f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}" class="tick"/>'
            yield _text(x, bottom + 20, f"{value:,.{decimals}f}", "middle")
        yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, across, "middle")
        yield _text(LEFT - 70, TOP - 10, up, "start")

    def line(self, place: int, named: tuple[str, Points]) -> Iterator[str]:
        name, points = named
        colour = COLOURS[place % len(COLOURS)]
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points if y > 0)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        y = TOP + 18 * place
        yield f'<rect x="{WIDTH - RIGHT + 14}" y="{y}" width="12" height="4" fill="{colour}"/>'
        yield _text(WIDTH - RIGHT + 32, y + 6, name, "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}">{escape(text)}</text>'
