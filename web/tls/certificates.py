"""The certificates that a service shows to others: when they end, and whether changed files are in use.

Health checks call `look` regularly, so that a fault of new files is seen before the next connection needs them.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import structlog
from cryptography import x509
from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from web.tls.context import ReloadedContext

RELOAD_FAILED, ENDS_SOON = "certificate_not_reloaded", "certificate_ends_soon"
WARN_BEFORE = timedelta(days=7)
WARN_FRACTION = 10  # or when a tenth of a shorter life is left

_log = structlog.get_logger("web.tls")


class CertificateStatus(Struct, frozen=True, kw_only=True):
    """A certificate that this service shows."""

    use: str  # `http`: to its clients; `coordinator` and `store`: as their client
    not_after: datetime
    fault: str | None  # why changed files are not in use


class CertificateFinding(NamedTuple):
    code: str
    text: str
    use: str


class _Life(NamedTuple):
    not_before: datetime
    not_after: datetime

    def is_ending(self, now: datetime) -> bool:
        return self.not_after - now < min(WARN_BEFORE, (self.not_after - self.not_before) / WARN_FRACTION)


class Certificates(Collector):
    """The contexts of a service, by what they are used for."""

    def __init__(self, contexts: Mapping[str, ReloadedContext | None], registry: CollectorRegistry) -> None:
        self._contexts = {use: context for use, context in contexts.items() if context is not None}
        self._reloads = dict.fromkeys(self._contexts, 0)
        self._lives: dict[str, tuple[bytes, _Life]] = {}
        registry.register(self)

    def look(self, now: datetime) -> list[CertificateFinding]:
        """Read changed files, log which are in use now, and return what is wrong."""
        for use, context in self._contexts.items():
            context.refresh()
            self._log_reload(use, context)
        return [*self._faults(), *self._ending(now)]

    def _faults(self) -> Iterator[CertificateFinding]:
        for use, context in self._contexts.items():
            if context.fault is not None:
                text = f"changed TLS files ({use}) are not in use, those before them are: {context.fault}"
                yield CertificateFinding(RELOAD_FAILED, text, use)

    def _ending(self, now: datetime) -> Iterator[CertificateFinding]:
        for use, life in self._shown():
            if life.is_ending(now):
                ends = "has expired" if now >= life.not_after else "ends soon"
                text = f"the certificate ({use}) {ends}: {life.not_after:%Y-%m-%d %H:%M:%S} UTC"
                yield CertificateFinding(ENDS_SOON, text, use)

    def status(self) -> list[CertificateStatus]:
        return [
            CertificateStatus(use=use, not_after=life.not_after, fault=self._contexts[use].fault)
            for use, life in self._shown()
        ]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        ends = GaugeMetricFamily(
            "leasehold_certificate_not_after_timestamp_seconds",
            "When a certificate that this service shows ends, by what it is used for.",
            labels=("use",),
        )
        for use, life in self._shown():
            ends.add_metric((use,), life.not_after.timestamp())
        yield ends

    def _shown(self) -> Iterator[tuple[str, _Life]]:
        for use, context in self._contexts.items():
            if (life := self._life(use, context)) is not None:
                yield use, life

    def _log_reload(self, use: str, context: ReloadedContext) -> None:
        if context.reloads > self._reloads[use]:
            self._reloads[use] = context.reloads
            life = self._life(use, context)
            ends = None if life is None else life.not_after.isoformat()
            _log.info("TLS files reloaded", use=use, not_after=ends)

    def _life(self, use: str, context: ReloadedContext) -> _Life | None:
        """Return when the certificate in use begins and ends. It is parsed once."""
        if context.certificate is None:
            return None
        known = self._lives.get(use)
        if known is None or known[0] != context.certificate:
            known = self._lives[use] = context.certificate, life_of(context.certificate)
        return known[1]


def life_of(pem: bytes) -> _Life:
    """Return the part of time in which all certificates of a file are valid."""
    chain = x509.load_pem_x509_certificates(pem)
    begins = max(each.not_valid_before_utc for each in chain)
    return _Life(begins.astimezone(UTC), min(each.not_valid_after_utc for each in chain).astimezone(UTC))
