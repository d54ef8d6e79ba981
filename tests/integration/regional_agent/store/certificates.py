"""Certificates of a private authority, and a listener that encrypts what goes to a store without TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from leasehold.local_stack import embedded
from tests.integration.regional_agent.store.test_topology import Switch


@dataclass
class Authority:
    """A certificate authority in a directory. `issue` writes NAME.pem and NAME.key."""

    directory: Path

    def __post_init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
        builder = self._builder(self.name, self.key)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.file = self._write("authority.pem", builder.sign(self.key, hashes.SHA256()))

    def issue(self, name: str, hosts: tuple[str, ...] = (embedded.LOOPBACK,)) -> tuple[Path, Path]:
        """Return the files of a certificate for these hosts, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ip_address(host)) if host[0].isdigit() else x509.DNSName(host) for host in hosts]
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key).add_extension(x509.SubjectAlternativeName(names), critical=False)
        key_file = self.directory / f"{name}.key"
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return self._write(f"{name}.pem", builder.sign(self.key, hashes.SHA256())), key_file

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(self.name, subject, key.public_key(), x509.random_serial_number())
        return builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))

    def _write(self, name: str, certificate: x509.Certificate) -> Path:
        file = self.directory / name
        file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return file


@asynccontextmanager
async def encrypted(
    target: int, authority: Authority, *, hosts: tuple[str, ...] = (embedded.LOOPBACK,), asks_for_one: bool = False
) -> AsyncIterator[int]:
    """Yield a port where the store at `target` is reached with TLS. `asks_for_one`: clients need a certificate too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("store", hosts))
    if asks_for_one:
        context.load_verify_locations(authority.file)
        context.verify_mode = ssl.CERT_REQUIRED
    switch = Switch()
    switch.target = target
    server = await asyncio.start_server(switch.accept, embedded.LOOPBACK, 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        switch.turn(0)
