"""Metrics of the gRPC door. Calls are counted in plain numbers, which become samples when they are scraped."""

from collections import defaultdict
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from regional_agent.envoy.door.methods import Status
from web.metrics import Durations

BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class GrpcMetrics(Collector):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls: defaultdict[tuple[str, Status], int] = defaultdict(int)
        self._seconds: defaultdict[str, Durations] = defaultdict(lambda: Durations(BUCKETS_S))
        self.count_connections: Callable[[], int] = lambda: 0
        self.count_streams: Callable[[], int] = lambda: 0
        registry.register(self)

    def note(self, method: str, status: Status, seconds: float) -> None:
        self._calls[method, status] += 1
        self._seconds[method].observe(seconds)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        calls = CounterMetricFamily(
            "leasehold_grpc_calls", "Calls of the gRPC door that were answered.", labels=("method", "status")
        )
        for (method, status), count in self._calls.items():
            calls.add_metric((method, status.name), count)
        yield calls
        seconds = HistogramMetricFamily(
            "leasehold_grpc_call_duration_seconds",
            "Time to answer a call of the gRPC door; of a stream, how long it was open.",
            labels=("method",),
        )
        for method, durations in self._seconds.items():
            durations.add_to(seconds, (method,))
        yield seconds
        yield GaugeMetricFamily(
            "leasehold_grpc_connections", "Connections to the gRPC door that are open.", self.count_connections()
        )
        yield GaugeMetricFamily("leasehold_grpc_streams", "Calls of the gRPC door under way.", self.count_streams())
