"""The certificate that a client showed, read from its connection.

The TLS library returns only a certificate that it has verified. A client that showed none, or that a server did not ask
for one, has none here.
"""

import asyncio
import ssl
from time import time
from typing import Any, NamedTuple


class PeerCertificate(NamedTuple):
    """What a server uses of a client's certificate."""

    uris: tuple[str, ...]  # the URIs among its subject's alternative names
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
    names: Any = certificate.get("subjectAltName", ())  # pairs of a kind and a name
    uris = tuple(name for kind, name in names if kind == "URI")
    return PeerCertificate(uris, ssl.cert_time_to_seconds(str(certificate["notAfter"])))
