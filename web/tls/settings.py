"""The settings of TLS that both services have, and what makes a set of files unusable at the start."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, FilePath

from web.tls.context import CertificatesUnusable, TlsFiles, client_context, server_context

CertFile = Annotated[
    FilePath | None,
    Field(
        examples=["/etc/leasehold/server.pem"],
        description=(
            "Certificate (PEM) that this service shows, followed by those of authorities in between. With it the "
            "service speaks HTTPS only."
        ),
    ),
]
KeyFile = Annotated[
    FilePath | None,
    Field(
        examples=["/etc/leasehold/server.key"], description="Its key (PEM, unencrypted), if it is in a file of its own."
    ),
]
ClientCaFile = Annotated[
    FilePath | None,
    Field(
        examples=["/etc/leasehold/ca.pem"],
        description=(
            "Authorities (PEM) that sign the certificates of clients. With it every client has to show one, unless "
            "`TLS_REQUIRE_CLIENT_CERT` is false."
        ),
    ),
]
RequireClientCert = Annotated[
    bool,
    Field(
        examples=["true"],
        description=(
            "Set it to false to serve clients without a certificate as well, such as probes. Those that show one are "
            "verified in any case."
        ),
    ),
]


def check_server_files(prefix: str, files: TlsFiles) -> None:
    """Raise a ValueError that names the variable if these files cannot be served with."""
    named = {f"{prefix}_KEY_FILE": files.key_file, f"{prefix}_CLIENT_CA_FILE": files.ca_file}
    _check_certificate_is_set(f"{prefix}_CERT_FILE", files.cert_file, named)
    if files.cert_file is not None:
        try:
            server_context(files)
        except CertificatesUnusable as error:
            raise ValueError(f"{prefix}_CERT_FILE and what belongs to it cannot be used: {error}") from None


def check_client_files(prefix: str, files: TlsFiles, *, has_tls: bool) -> None:
    """Raise a ValueError that names the variable if these files have no use, or cannot be used."""
    for name, path in zip(("CA", "CERT", "KEY"), files, strict=True):
        if path is not None and not has_tls:
            raise ValueError(
                f"{prefix}_{name}_FILE is set, and {prefix}_URL is without TLS: it would have to begin with https"
            )
    _check_certificate_is_set(f"{prefix}_CERT_FILE", files.cert_file, {f"{prefix}_KEY_FILE": files.key_file})
    if not has_tls:
        return
    try:
        client_context(files)
    except CertificatesUnusable as error:
        raise ValueError(f"{prefix}_CA_FILE, _CERT_FILE and _KEY_FILE cannot be used: {error}") from None


def _check_certificate_is_set(name: str, path: Path | None, others: Mapping[str, Path | None]) -> None:
    for other, other_path in others.items():
        if other_path is not None and path is None:
            raise ValueError(f"{other} is set without {name}")
