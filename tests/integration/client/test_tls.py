"""Clients speak TLS, verify the agent's certificate, and show their own."""

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from leasehold import AgentUnavailable, AsyncClient, Client, Decision

ALLOWED = b'{"allowed":true,"degraded":null,"policies":[],"denied_by":null,"retry_after_ms":0}'
EXPORT = {"tenant": "acme", "route": "/v1/exports"}


class Files(NamedTuple):
    certificate: Path
    key: Path


def make_certificate(directory: Path, name: str) -> Files:
    """Make a self-signed certificate for 127.0.0.1, which is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = Files(directory / f"{name}.pem", directory / f"{name}.key")
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


class Agent(BaseHTTPRequestHandler):
    """Allows everything, over connections that are kept."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(ALLOWED)))
        self.end_headers()
        self.wfile.write(ALLOWED)

    def log_message(self, *_: Any) -> None:
        """Stay silent."""


class Server(ThreadingHTTPServer):
    connections = 0

    def get_request(self) -> tuple[Any, Any]:
        accepted = super().get_request()
        self.connections += 1
        return accepted

    def handle_error(self, *_: Any) -> None:
        """Stay silent about refused handshakes."""


@contextmanager
def agent(files: Files, trusted_client: Files | None = None) -> Iterator[tuple[Server, str]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    if trusted_client is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(trusted_client.certificate)
    server = Server(("127.0.0.1", 0), Agent)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server, f"https://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def check(kind: str, url: str, times: int = 1, **options: Any) -> list[Decision]:
    """Check so many times through one client."""
    if kind == "blocking":
        with Client(url, on_failure="raise", **options) as client:
            return [client.check(EXPORT) for _ in range(times)]

    async def awaited() -> list[Decision]:
        async with AsyncClient(url, on_failure="raise", **options) as client:
            return [await client.check(EXPORT) for _ in range(times)]

    return asyncio.run(awaited())


both = pytest.mark.parametrize("kind", ["blocking", "awaited"])


@both
def test_a_connection_over_tls_is_verified_and_kept(kind: str, tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "agent")
    with agent(files) as (server, url):
        assert [each.allowed for each in check(kind, url, 3, ca_file=files.certificate)] == [True] * 3
    assert server.connections == 1


@both
def test_an_agent_with_an_unknown_certificate_is_unavailable(kind: str, tmp_path: Path) -> None:
    files, others = make_certificate(tmp_path, "agent"), make_certificate(tmp_path, "other")
    with agent(files) as (_, url):
        for ca_file in (None, others.certificate):
            with pytest.raises(AgentUnavailable, match=r"https://127\.0\.0\.1:.*certificate verify failed"):
                check(kind, url, ca_file=ca_file)


@both
def test_an_agent_may_require_a_certificate_of_the_client(kind: str, tmp_path: Path) -> None:
    files, own = make_certificate(tmp_path, "agent"), make_certificate(tmp_path, "client")
    with agent(files, trusted_client=own) as (_, url):
        assert check(kind, url, ca_file=files.certificate, certificate=own)[0].allowed
        with pytest.raises(AgentUnavailable):
            check(kind, url, ca_file=files.certificate)


def test_files_for_tls_without_https_are_refused(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "agent")
    for options in ({"ca_file": files.certificate}, {"certificate": files}):
        with pytest.raises(ValueError, match="does not begin with https"):
            Client("http://127.0.0.1:8411", **options)
    with pytest.raises(ValueError, match=r"missing\.pem: No such file"):
        Client("https://127.0.0.1:8411", ca_file=tmp_path / "missing.pem")
