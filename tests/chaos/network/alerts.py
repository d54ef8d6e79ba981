"""The shipped alerts, which a real Prometheus evaluates over the metrics of a stack while its faults last.

A fault here lasts seconds, and alerts wait for minutes. So each duration of the rules (`for`, ranges, offsets) is
divided by FACTOR: a second here counts as a minute. What the rules compare with stays as it is, and so do the services.
"""

import http.server
import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from leasehold.local_stack.embedded import LOOPBACK
from leasehold.local_stack.processes import spawn, stop, wait_until
from tests.chaos.network.stack import DividedStack, place_of
from tests.chaos.pieces import AGENTS, PATIENCE_S
from tests.conftest import free_port
from tests.parts import part

SHIPPED = Path(__file__).parents[3] / "compose" / "prometheus" / "alerts.yaml"
FACTOR = 60
EVERY = "1s"
COORDINATOR = "coordinator"
SCRAPE_WITHIN_S = 0.9
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(for: |\[|offset )(\d+)([smhd])")


def names_of_alerts() -> set[str]:
    groups = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"] for group in groups for rule in group["rules"]}


def quickened(rules: str) -> str:
    """Divide each duration of alert rules by FACTOR."""
    return _DURATION.sub(lambda at: f"{at[1]}{int(at[2]) * _SECONDS[at[3]] * 1000 // FACTOR}ms", rules)


class Firing(NamedTuple):
    name: str
    since: datetime  # when its condition began to hold


class Alerts:
    """Asks a Prometheus which alerts fire."""

    def __init__(self, url: str) -> None:
        self._url = url

    def is_ready(self) -> bool:
        return all(each["health"] != "unknown" for each in self._get("targets")["activeTargets"])

    def firing(self) -> set[Firing]:
        found = [each for each in self._get("alerts")["alerts"] if each["state"] == "firing"]
        return {Firing(each["labels"]["alertname"], datetime.fromisoformat(each["activeAt"])) for each in found}

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}", timeout=PATIENCE_S) as answer:
            return json.load(answer)["data"]


@contextmanager
def watching(stack: DividedStack, directory: Path) -> Iterator[Alerts]:
    """Run Prometheus with the quickened alerts beside a stack."""
    directory.mkdir()
    with _exporter(stack) as exporter:
        configuration, rules, port = directory / "prometheus.json", directory / "alerts.yaml", free_port()
        rules.write_text(quickened(SHIPPED.read_text(encoding="utf-8")), encoding="utf-8")
        configuration.write_text(json.dumps(_configuration(exporter, rules)), encoding="utf-8")
        command: list[str | Path] = [
            part("prometheus") / "bin" / "prometheus",
            f"--config.file={configuration}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={LOOPBACK}:{port}",
        ]
        process = spawn(command, log=directory / "prometheus.log")
        alerts = Alerts(f"http://{LOOPBACK}:{port}")
        try:
            assert wait_until(lambda: _answers(alerts), PATIENCE_S), (directory / "prometheus.log").read_text()
            yield alerts
        finally:
            stop(process)


def _answers(alerts: Alerts) -> bool:
    try:
        return alerts.is_ready()
    except OSError:
        return False


def _configuration(exporter: str, rules: Path) -> dict[str, Any]:
    """Return the configuration of the runbook. JSON is YAML."""
    agents = [_target(exporter, name, region=region) for name, region in AGENTS.items()]
    return {
        "global": {"scrape_interval": EVERY, "scrape_timeout": EVERY, "evaluation_interval": EVERY},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": "leasehold-agent", "static_configs": agents},
            {"job_name": "leasehold-coordinator", "static_configs": [_target(exporter, COORDINATOR)]},
        ],
    }


def _target(exporter: str, name: str, **labels: str) -> dict[str, Any]:
    return {"targets": [exporter], "labels": {"__metrics_path__": f"/{name}", "instance": name, **labels}}


@contextmanager
def _exporter(stack: DividedStack) -> Iterator[str]:
    """Serve the metrics of each service, read at its place, where Prometheus is not."""

    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/")
            url = stack.coordinator if name == COORDINATOR else stack.agents[name]
            try:
                with (
                    stack.wan.inside(place_of(name)),
                    urllib.request.urlopen(f"{url}/metrics", timeout=SCRAPE_WITHIN_S) as answer,
                ):
                    kind, metrics = answer.headers["Content-Type"], answer.read()
            except (OSError, HTTPException):
                kind, metrics = "text/plain", b"no answer"  # which Prometheus cannot parse: the target is down
            with suppress(OSError):  # Prometheus does not wait longer
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(metrics)

        def log_message(self, *_arguments: object) -> None:
            """Print nothing."""

    server = http.server.ThreadingHTTPServer((LOOPBACK, 0), Metrics)
    thread = threading.Thread(target=server.serve_forever, name="exporter", daemon=True)
    thread.start()
    try:
        yield f"{LOOPBACK}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
