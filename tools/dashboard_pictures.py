"""Draw the dashboards from a real Prometheus that scrapes a real stack: `python -m tools.dashboard_pictures`.

`leasehold up` runs three regions for a minute under a light load. The store of one region is stopped for ten seconds,
and later the coordinator. Then Prometheus answers each panel's queries, and the answers are drawn as SVG. There is no
Grafana in this: the pictures show the numbers, and not Grafana's looks.
"""

import asyncio
import json
import math
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx

from benchmarks.picture import COLOURS, STYLE
from benchmarks.stack import Stack, host_and_port, local_stack
from tools.dashboards import DASHBOARDS, Dashboard, document
from tools.parts import fetch

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
ALERTS = Path(__file__).parent.parent / "compose" / "prometheus" / "alerts.yaml"
SECONDS, STORE_STOPS_S, COORDINATOR_STOPS_S, STOPPED_S = 60, 15, 35, 10
CHECKS_PER_S = 15  # in each region
RATE_INTERVAL = "10s"
PORT, PROMETHEUS_PORT = 26_700, 26_790
UNIT_X, UNIT_Y, MARGIN = 50, 24, 8  # of Grafana's grid, in points
MOST_LINES = 8
Points = Sequence[tuple[float, float]]


class Frame(NamedTuple):
    """A panel's place in the picture."""

    x: float
    y: float
    width: float
    height: float


async def main() -> None:
    async with local_stack(PORT) as stack, prometheus(stack) as client:
        began_s = await _server_time(client)
        load = [asyncio.create_task(_check_on(url)) for url in stack["agents"].values()]
        faults = asyncio.create_task(_make_faults(stack["pids"]))
        await asyncio.sleep(SECONDS)
        for task in (*load, faults):
            task.cancel()
        await asyncio.gather(*load, faults, return_exceptions=True)
        PICTURES.mkdir(exist_ok=True)
        for dashboard in DASHBOARDS:
            svg = "\n".join([part async for part in _draw(client, dashboard, began_s)])
            (PICTURES / f"dashboard-{dashboard.name}.svg").write_text(svg + "\n", encoding="utf-8")


@asynccontextmanager
async def prometheus(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """Run Prometheus beside a stack, with the alerts that are shipped."""
    agents = [
        {"targets": [":".join(map(str, host_and_port(url)))], "labels": {"region": name}}
        for name, url in stack["agents"].items()
    ]
    coordinator = ":".join(map(str, host_and_port(stack["coordinator"])))
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": "leasehold-agent", "static_configs": agents},
            {"job_name": "leasehold-coordinator", "static_configs": [{"targets": [coordinator]}]},
        ],
    }
    with TemporaryDirectory() as directory:
        path = Path(directory) / "prometheus.json"  # JSON is YAML
        path.write_text(json.dumps(config), encoding="utf-8")
        address = f"127.0.0.1:{PROMETHEUS_PORT}"
        command = [
            str(fetch("prometheus") / "bin" / "prometheus"),
            f"--config.file={path}",
            f"--storage.tsdb.path={directory}/data",
            f"--web.listen-address={address}",
        ]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        try:
            async with httpx.AsyncClient(base_url=f"http://{address}", timeout=30) as client:
                await _until_ready(client)
                yield client
        finally:
            process.terminate()
            await process.wait()


async def _until_ready(client: httpx.AsyncClient) -> None:
    for _ in range(300):
        with suppress(httpx.TransportError):
            if (await client.get("/-/ready")).is_success:
                return
        await asyncio.sleep(0.1)
    raise SystemExit("Prometheus does not become ready")


async def _server_time(client: httpx.AsyncClient) -> float:
    return float((await client.get("/api/v1/query", params={"query": "time()"})).json()["data"]["result"][1])


async def _check_on(url: str) -> None:
    """Check for ever: exports of an allowance, and searches of a rate that is exceeded now and then."""
    async with httpx.AsyncClient(base_url=url, timeout=5) as client:
        for number in range(1_000_000):
            route = "/v1/exports" if number % 2 else "/v1/search"
            check = {"subject": {"tenant": f"tenant-{number % 7}", "route": route, "method": "POST"}}
            with suppress(httpx.TransportError):
                await client.post("/v1/check", json=check)
            await asyncio.sleep(1 / CHECKS_PER_S)


async def _make_faults(pids: Mapping[str, int]) -> None:
    await asyncio.sleep(STORE_STOPS_S)
    await _stop(pids["store-eu-west"])
    await asyncio.sleep(COORDINATOR_STOPS_S - STORE_STOPS_S - STOPPED_S)
    await _stop(pids["coordinator"])


async def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(STOPPED_S)
    finally:
        os.kill(pid, signal.SIGCONT)


# --- drawing ----------------------------------------------------------------------------------------------------------


async def _draw(client: httpx.AsyncClient, dashboard: Dashboard, began_s: float) -> AsyncIterator[str]:
    panels = document(dashboard)["panels"]
    frames = [_frame(panel["gridPos"]) for panel in panels]
    width, height = 24 * UNIT_X + MARGIN, max(each.y + each.height for each in frames) + MARGIN
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" font-family="sans-serif">'
    yield STYLE
    yield f'<rect width="{width}" height="{height:g}" class="ground"/>'
    for panel, frame in zip(panels, frames, strict=True):
        lines = await _answers(client, panel["targets"], began_s)
        unit = panel["fieldConfig"]["defaults"]["unit"]
        place = f'x="{frame.x}" y="{frame.y}" width="{frame.width}" height="{frame.height}"'
        yield f'<rect {place} fill="none" class="grid"/>'
        yield _text(frame.x + 8, frame.y + 18, panel["title"], 13)
        for part in _stat(frame, lines, unit) if panel["type"] == "stat" else _graph(frame, lines, unit, began_s):
            yield part
    yield "</svg>"


def _frame(place: Mapping[str, int]) -> Frame:
    x, y = MARGIN + place["x"] * UNIT_X, MARGIN + place["y"] * UNIT_Y
    return Frame(x, y, place["w"] * UNIT_X - MARGIN, place["h"] * UNIT_Y - MARGIN)


async def _answers(client: httpx.AsyncClient, targets: Sequence[Any], began_s: float) -> dict[str, Points]:
    """Return the lines of a panel by their legends, as Prometheus answers its queries."""
    found: dict[str, Points] = {}
    for target in targets:
        query = re.sub(r"\$\w+", ".+", target["expr"].replace("$__rate_interval", RATE_INTERVAL))
        params: dict[str, str | float] = {"query": query, "start": began_s, "end": began_s + SECONDS, "step": 1}
        answer = (await client.get("/api/v1/query_range", params=params)).json()
        if answer["status"] != "success":
            raise SystemExit(f"{query}: {answer['error']}")
        for series in answer["data"]["result"]:
            legend = _legend(target["legendFormat"], series["metric"])
            points = [(float(at), float(value)) for at, value in series["values"]]
            found[legend.strip()] = [point for point in points if math.isfinite(point[1])]
    return {legend: points for legend, points in found.items() if points}


def _legend(template: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda name: labels.get(name[1], ""), template)


def _stat(frame: Frame, lines: Mapping[str, Points], unit: str) -> Iterator[str]:
    latest = [points[-1][1] for points in lines.values()]
    yield _text(frame.x + 8, frame.y + frame.height / 2 + 20, _shown(latest[0], unit) if latest else "no data", 26)


def _graph(frame: Frame, lines: Mapping[str, Points], unit: str, began_s: float) -> Iterator[str]:
    left, right, top, bottom = frame.x + 62, frame.x + frame.width - 200, frame.y + 32, frame.y + frame.height - 24
    shown = dict(sorted(lines.items(), key=lambda line: -max(y for _, y in line[1]))[:MOST_LINES])
    highest = max((y for points in shown.values() for _, y in points), default=0.0) or 1.0
    for part in range(3):
        y = bottom - part / 2 * (bottom - top)
        yield f'<line x1="{left:g}" y1="{y:g}" x2="{right:g}" y2="{y:g}" class="grid"/>'
        yield _text(left - 6, y + 4, _shown(part / 2 * highest, unit), 11, "end")
    for second in range(0, SECONDS + 1, 10):
        x = left + second / SECONDS * (right - left)
        yield _text(x, bottom + 16, f"{second} s", 10, "middle")
    for place, (legend, points) in enumerate(shown.items()):
        colour = COLOURS[place % len(COLOURS)]
        across, up = (right - left) / SECONDS, (bottom - top) / highest
        path = " ".join(f"{left + (at - began_s) * across:.1f},{bottom - max(0.0, y) * up:.1f}" for at, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        yield f'<rect x="{right + 10:g}" y="{top + 17 * place - 2:g}" width="10" height="4" fill="{colour}"/>'
        yield _text(right + 25, top + 17 * place + 4, legend[:26], 11)
    if not shown:
        yield _text(left + 10, (top + bottom) / 2, "nothing: there is no such series", 12)
    elif len(lines) > MOST_LINES:
        yield _text(right + 25, top + 17 * MOST_LINES + 4, f"{len(lines) - MOST_LINES} more", 11)


def _shown(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s" and abs(value) < 1:
        return f"{1000 * value:.3g} ms"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}{'B' if unit == 'bytes' else ''}"
    return f"{value:.3g}{ {'s': ' s', 'bytes': ' B', 'ops': '/s'}.get(unit, '') }"


def _text(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
