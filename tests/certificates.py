"""Certificates of a private authority, as a company has one."""

import ipaddress
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from web.tls.context import TlsFiles

LOOPBACK = "127.0.0.1"
DAY = timedelta(days=1)


@dataclass
class Authority:
    """A certificate authority in a directory. `issue` writes NAME.pem and NAME.key."""

    directory: Path
    name: str = "authority"

    def __post_init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, self.name)])
        builder = self._builder(self.subject, self.key, 30 * DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        usage = dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "crl_sign": True}
        builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
        self.file = self._write(f"{self.name}.pem", builder.sign(self.key, hashes.SHA256()))

    def issue(
        self,
        name: str,
        hosts: Sequence[str] = (LOOPBACK,),
        *,
        uris: Sequence[str] = (),
        ends_in: timedelta = 30 * DAY,
    ) -> tuple[Path, Path]:
        """Return the files of a certificate with these names, and of its key. Existing files are replaced."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key, ends_in)
        names = [*map(_host, hosts), *map(x509.UniformResourceIdentifier, uris)]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        key_file = self.directory / f"{name}.key"
        encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        _replace(key_file, key.private_bytes(*encoding))
        return self._write(f"{name}.pem", builder.sign(self.key, hashes.SHA256())), key_file

    def files(self, name: str, trusted: "Authority | None" = None, **options: object) -> TlsFiles:
        """Issue a certificate, and return its files with the authority that the other side's has to be signed by."""
        cert_file, key_file = self.issue(name, **options)  # type: ignore[arg-type]
        return TlsFiles((trusted or self).file, cert_file, key_file)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, ends_in: timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        return (
            x509.CertificateBuilder(self.subject, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - 60 * DAY)
            .not_valid_after(now + ends_in)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(authority, critical=False)
        )

    def _write(self, name: str, certificate: x509.Certificate) -> Path:
        file = self.directory / name
        _replace(file, certificate.public_bytes(serialization.Encoding.PEM))
        return file


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _replace(file: Path, content: bytes) -> None:
    """Replace a file in one step, as those who rotate certificates do."""
    draft = file.with_suffix(".new")
    draft.write_bytes(content)
    os.replace(draft, file)


class Handshake:
    """A connection in memory, its two ends, and what each of them raised."""

    def __init__(self, client: ssl.SSLContext, server: ssl.SSLContext, host: str = LOOPBACK) -> None:
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = client.wrap_bio(to_client, to_server, server_hostname=host)
        self.server = server.wrap_bio(to_server, to_client, server_side=True)
        self.failures: dict[str, ssl.SSLError] = {}
        for _ in range(4):
            for name, end in (("client", self.client), ("server", self.server)):
                self._advance(name, end)
        for name, end in (("client", self.client), ("server", self.server)):  # a last alert may be unread
            self._read(name, end)

    def _advance(self, name: str, end: ssl.SSLObject) -> None:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            self.failures.setdefault(name, error)

    def _read(self, name: str, end: ssl.SSLObject) -> None:
        try:
            end.read(1)
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            self.failures.setdefault(name, error)


_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)
