"""Count and log the TLS handshakes that fail at a server, with the reason.

asyncio and uvloop close such a connection without a log line, and before the TLS library's alert is sent, so the client
does not learn either that its certificate was refused. The hook is `sslobject_class`, which the ssl module documents:
each connection's handshake is done by an object of it. After a failure this one says once that it waits for input.
Then the event loop sends the alert, and the connection ends with the next input, with the client's end, or with the
time for handshakes. A client that goes away during its handshake is not counted.
"""

import ssl
from collections import Counter
from collections.abc import Iterator, Sequence
from time import monotonic

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from web.tls.context import ReloadedContext, TlsFiles, server_context
from web.tls.reasons import code_of, describe

LOG_EVERY_S = 60.0  # for each reason

_log = structlog.get_logger("web.tls")


class FailedHandshakes(Collector):
    """The failed handshakes of one server, by reason."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts: Counter[str] = Counter()
        self._logged_at_s: dict[str, float] = {}
        registry.register(self)

    def note(self, error: ssl.SSLError) -> None:
        code, now_s = code_of(error), monotonic()
        self._counts[code] += 1
        if now_s >= self._logged_at_s.get(code, float("-inf")) + LOG_EVERY_S:
            self._logged_at_s[code] = now_s
            _log.warning("TLS handshake failed", code=code, reason=describe(error), failures=self._counts[code])

    def watch(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """Note the failures of this server context's connections."""
        failures = self

        class Watched(ssl.SSLObject):
            failure: ssl.SSLError | None = None

            def do_handshake(self) -> None:
                if self.failure is not None:
                    raise self.failure
                try:
                    super().do_handshake()
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    raise
                except ssl.SSLError as error:
                    failures.note(error)
                    self.failure = error
                    raise ssl.SSLWantReadError("the alert has to be sent first") from error

        context.sslobject_class = Watched
        return context

    def collect(self) -> Iterator[CounterMetricFamily]:
        failed = CounterMetricFamily(
            "leasehold_tls_handshakes_failed", "TLS handshakes that failed at this server.", labels=("reason",)
        )
        for code, count in self._counts.items():
            failed.add_metric((code,), count)
        yield failed


def serving_context(
    files: TlsFiles,
    *,
    requires_client_certificate: bool,
    handshakes: FailedHandshakes,
    protocols: Sequence[str] = (),
) -> ReloadedContext | None:
    """Return the context of a server, whose connections follow changes of its files, or None without a certificate.

    `protocols` are those that clients may choose from during the handshake (ALPN).
    """
    if files.cert_file is None:
        return None

    def make(files: TlsFiles) -> ssl.SSLContext:
        context = server_context(files, requires_client_certificate=requires_client_certificate)
        if protocols:
            context.set_alpn_protocols(protocols)
        return handshakes.watch(context)

    return ReloadedContext(files, make)
