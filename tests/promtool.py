"""promtool, which checks metrics, rules and queries as Prometheus reads them."""

import subprocess
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.parts import part
from web.declared_metrics import DeclaredMetrics


def promtool() -> Path:
    return part("prometheus") / "bin" / "promtool"


def check_metrics(text: str) -> None:
    """Assert that promtool has nothing to say about an exposition."""
    done = subprocess.run([promtool(), "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    created = [family.name for family in text_string_to_metric_families(text) if family.name.endswith("_created")]
    assert not created, created


def touch(metrics: DeclaredMetrics) -> None:
    """Make a sample of every declared metric with labels: of one that was never counted promtool sees nothing."""
    for each in vars(metrics).values():
        if isinstance(each, DeclaredMetrics):
            touch(each)
        elif names := getattr(each, "_labelnames", ()):
            each.labels(*["x"] * len(names))
