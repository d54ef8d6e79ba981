"""The certificate that a client showed, read from its connection.

The TLS library returns only a certificate that it has verified. A client that showed none, or that a server did not ask
for one, has none here.
"""

import asyncio
import ssl
from collections.abc import Callable
from time import time
from typing import Any, NamedTuple

MAX_NAMES = 64  # a certificate with more of them names nothing
IDENTITY_PATTERN = r"^([a-z][a-z0-9+.-]*://[!-~]+|[a-z0-9-]+(\.[a-z0-9-]+)+)$"  # a URI, or a host name
END_BEFORE_S = 1.0  # the end of a certificate, a connection that it permits is ended


class PeerCertificate(NamedTuple):
    """The parts of a client's certificate that a server uses."""

    names: tuple[str, ...]  # the URIs and host names among its subject's alternative names; no text is both
    ends_at_s: float  # Unix time

    @property
    def is_valid_now(self) -> bool:
        """Return whether it has not expired since the handshake: connections may last for long."""
        return time() < self.ends_at_s


def peer_certificate_of(transport: asyncio.BaseTransport) -> PeerCertificate | None:
    """Return the verified certificate of the client of a connection, if it has shown one."""
    connection: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    certificate = connection.getpeercert() if connection is not None else None
    if not certificate:
        return None
    named: Any = certificate.get("subjectAltName", ())  # pairs of a kind and a name
    names = tuple(dict.fromkeys(name for kind, value in named if (name := _name(kind, value))))
    ends_at_s = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    return PeerCertificate(names if len(names) <= MAX_NAMES else (), ends_at_s)


def call_before_end(certificate: PeerCertificate | None, end: Callable[[], object]) -> asyncio.TimerHandle | None:
    """End a connection shortly before the certificate that permits it, so that the next one shows its successor."""
    left_s = 0.0 if certificate is None else certificate.ends_at_s - time() - END_BEFORE_S
    return asyncio.get_running_loop().call_later(left_s, end) if left_s > 0 else None


def _name(kind: str, value: str) -> str | None:
    if kind == "URI" and "://" in value:
        return value
    return value.lower() if kind == "DNS" and "://" not in value else None
