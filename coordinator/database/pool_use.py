"""How the pools of connections to Postgres are used, for the metrics: their size, who waits, and for how long."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import asyncpg
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from web.metrics import Durations

if TYPE_CHECKING:
    Pool: TypeAlias = asyncpg.Pool[asyncpg.Record]
else:
    Pool = asyncpg.Pool

_PREFIX = "leasehold_coordinator_database_"
_WAIT_BUCKETS_S = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0)  # after 5 s a request gives up


class PoolUse:
    """The use of one pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.waiting = 0
        self.wait_s = Durations(_WAIT_BUCKETS_S)

    @property
    def connections(self) -> dict[str, int]:
        idle = self.pool.get_idle_size()
        return {"idle": idle, "in_use": self.pool.get_size() - idle}


class PoolMetrics(Collector):
    """The pools of one coordinator by their names: for requests, for background jobs, and for the decision log."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pools: dict[str, PoolUse] = {}
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily | HistogramMetricFamily]:
        connections = GaugeMetricFamily(
            f"{_PREFIX}connections", "Connections to Postgres that are open.", labels=("pool", "state")
        )
        limits = GaugeMetricFamily(f"{_PREFIX}connections_limit", "Connections that a pool may open.", labels=("pool",))
        waiters = GaugeMetricFamily(f"{_PREFIX}waiters", "Operations that wait for a connection.", labels=("pool",))
        seconds = HistogramMetricFamily(
            f"{_PREFIX}wait_duration_seconds", "Time that operations waited for a connection.", labels=("pool",)
        )
        for name, use in self.pools.items():
            for state, count in use.connections.items():
                connections.add_metric((name, state), count)
            limits.add_metric((name,), use.pool.get_max_size())
            waiters.add_metric((name,), use.waiting)
            use.wait_s.add_to(seconds, (name,))
        yield from (connections, limits, waiters, seconds)
