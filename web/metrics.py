"""Prometheus metrics of HTTP requests, and their exposition at /metrics.

Requests are counted in plain integers, which become samples when metrics are scraped: a labelled counter of the client
library costs a tenth of a check.

Labels are routes as declared, not paths as sent, so that no client can fill the memory with new labels.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import Response

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
# Between 0.1 and 1 s they are close together, because that is how long requests `wait` for units.
WAIT_BUCKETS_S = (0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, *WAIT_BUCKETS_S)
_HELD_BUCKETS_S = (0.1, 1.0, 5.0, 10.0, 15.0, 19.0, 21.0, 30.0, 60.0, 300.0)  # a long poll ends after 20 s
IS_HELD_OPEN = "leasehold.is_held_open"  # a key of an ASGI scope


class Durations:
    """A histogram that takes one bisection and two additions for each observation."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += times
        self._sum_s += seconds * times

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        bounds = (*(str(float(bound)) for bound in self._bounds_s), "+Inf")
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum_s)


class HttpMetrics(Collector):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        self._seconds: defaultdict[str, Durations] = defaultdict(lambda: Durations(_BUCKETS_S))
        self._held_seconds: defaultdict[str, Durations] = defaultdict(lambda: Durations(_HELD_BUCKETS_S))
        registry.register(self)

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        self._requests[route, method, status] += 1
        self._seconds[route].observe(seconds)

    def observe_held(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request that waited for news: its duration says nothing of how fast the service is."""
        self._requests[route, method, status] += 1
        self._held_seconds[route].observe(seconds)

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        requests = CounterMetricFamily("leasehold_http_requests", "Requests answered.", labels=_LABELS)
        for (route, method, status), count in self._requests.items():
            requests.add_metric((route, method, str(status)), count)
        yield requests
        for name, help_text, by_route in (
            ("request", "Time to answer a request, except long polls and event streams.", self._seconds),
            ("held_request", "Time for which long polls and event streams were held open.", self._held_seconds),
        ):
            seconds = HistogramMetricFamily(f"leasehold_http_{name}_duration_seconds", help_text, labels=("route",))
            for route, durations in by_route.items():
                durations.add_to(seconds, (route,))
            yield seconds


_LABELS = ("route", "method", "status")


def describe_process(registry: CollectorRegistry, **build: str) -> None:
    """Show what this process is built from, and what it uses of the machine."""
    info = Gauge("leasehold_build_info", "1: what this process is built from.", [*sorted(build)], registry=registry)
    info.labels(**build).set(1)
    ProcessCollector(registry=registry)


def hold_open(scope: MutableMapping[str, Any]) -> None:
    """Mark a request as one that waits for news, so that its duration is counted apart."""
    scope[IS_HELD_OPEN] = True


def method_label(method: str) -> str:
    return method if method in _METHODS else "other"


def exposition(registry: CollectorRegistry) -> Response:
    return shown(generate_latest(registry))


def shown(text: bytes) -> Response:
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


def merged(texts: Mapping[str, str], label: str, more: Collector) -> bytes:
    """Merge several expositions into one. A further label says which of them a sample is from."""
    registry = CollectorRegistry()
    registry.register(_Merged(texts, label))
    registry.register(more)
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, texts: Mapping[str, str], label: str) -> None:
        self._texts = texts
        self._label = label

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    into.add_sample(sample.name, sample.labels | {self._label: name}, sample.value)
        return families.values()
