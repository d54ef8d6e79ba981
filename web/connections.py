"""Limit the number of a server's connections, and how long a request may take to arrive.

Without these limits a client that opens connections and sends nothing, or sends a request a byte at a time, holds file
descriptors until the server has none left and cannot even answer its health check.
"""

import resource
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from time import monotonic
from typing import Protocol

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

REQUEST_TIMEOUT_S = 10.0
MIN_BODY_BYTES_PER_S = 1_000
MAX_CONNECTIONS = 10_000
SPARE_DESCRIPTORS = 200  # for the database, the store, files, and connections that are being closed
CANDIDATES = 64  # connections that are considered for closing in favour of a new one
LOG_EVERY_S = 10.0
TOO_MANY, REPLACED, SILENT, SLOW = "too_many", "replaced", "silent", "slow_request"
REASONS = (TOO_MANY, REPLACED, SILENT, SLOW)

_log = structlog.get_logger("web.connections")


class Connection(Protocol):
    """A connection that a limit may close."""

    @property
    def is_idle(self) -> bool: ...

    def drop(self, reason: str) -> None: ...


class ConnectionLimits(Collector):
    """The limits of one server, and the count of what they closed."""

    def __init__(
        self,
        *,
        max_connections: int = MAX_CONNECTIONS,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        min_body_bytes_per_s: int = MIN_BODY_BYTES_PER_S,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.max_connections = max_connections
        self.request_timeout_s = request_timeout_s
        self.min_body_bytes = int(min_body_bytes_per_s * request_timeout_s)
        self._open: set[Connection] = set()
        self._closed: Counter[str] = Counter()
        self._logged_at_s = float("-inf")
        if registry is not None:
            registry.register(self)

    def opened(self, connection: Connection) -> None:
        """Count a new connection. If there are too many, close an idle one, or else the new one."""
        self._open.add(connection)
        if len(self._open) <= self.max_connections:
            return
        # Only a few are considered: a full server should not spend its time on searching.
        others = (each for each in islice(self._open, CANDIDATES) if each is not connection)
        idle = next((each for each in others if each.is_idle), None)
        if idle is None:
            connection.drop(TOO_MANY)
        else:
            idle.drop(REPLACED)

    def lost(self, connection: Connection) -> None:
        self._open.discard(connection)

    def closed(self, reason: str) -> None:
        """Count a connection that a limit closes, and log the totals at most every LOG_EVERY_S."""
        self._closed[reason] += 1
        now_s = monotonic()
        if now_s >= self._logged_at_s + LOG_EVERY_S:
            self._logged_at_s = now_s
            _log.warning("connections closed by a limit", reason=reason, open=len(self._open), **self._totals())

    def _totals(self) -> dict[str, int]:
        return {f"closed_{reason}": count for reason, count in self._closed.items()}

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        yield GaugeMetricFamily("leasehold_http_connections", "Connections that are open.", len(self._open))
        yield GaugeMetricFamily(
            "leasehold_http_connections_limit", "Connections that may be open.", self.max_connections
        )
        closed = CounterMetricFamily(
            "leasehold_http_connections_closed", "Connections closed by a limit, by reason.", labels=("reason",)
        )
        for reason in REASONS:
            closed.add_metric((reason,), self._closed[reason])
        yield closed


def within_descriptors(max_connections: int) -> int:
    """Return how many connections this process can keep, after raising its soft limit of file descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max_connections if soft == resource.RLIM_INFINITY else max(1, min(max_connections, soft - SPARE_DESCRIPTORS))
