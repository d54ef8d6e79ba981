"""TLS contexts that read their files again, so that a rotated certificate needs no restart.

asyncio, uvloop and httpcore ask a context for an object for each connection (`wrap_bio`), so a context that passes this
call on to the newest one is enough. Each context is made from all files at once: while they do not belong together (a
certificate was replaced, and its key not yet), connections go on with the context before, and `fault` says why.
Connections that are open keep what they began with. A new context also has new session keys, so no session that an
authority's certificate opened is resumed after the authority was removed.

This module needs the standard library only, because the Python client uses it as well.
"""

import ssl
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Self

REREAD_S = 1.0  # reading three small files costs less than the handshake before which it is done


class TlsFiles(NamedTuple):
    """The files of one side of TLS connections, in PEM."""

    ca_file: Path | None = None  # the authorities that may sign the other side's certificate
    cert_file: Path | None = None  # our own certificate, followed by those of authorities in between
    key_file: Path | None = None  # its key, if the certificate's file does not have it

    def read(self) -> tuple[bytes | None, ...]:
        return tuple(None if path is None else path.read_bytes() for path in self)


class CertificatesUnusable(ValueError):
    """The files of a context cannot be used. The message says which file, and why."""


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context that verifies the server's certificate and name.

    With a CA file only its authorities are trusted, otherwise those that the machine trusts.
    """
    try:
        context = ssl.create_default_context(cafile=files.ca_file)
    except (OSError, ValueError) as error:
        raise CertificatesUnusable(f"{files.ca_file}: {_reason(error, 'certificate')}") from None
    _load_chain(context, files)
    return context


def server_context(files: TlsFiles, *, requires_client_certificate: bool = True) -> ssl.SSLContext:
    """Return a context for a server. With a CA file it verifies the certificates of clients."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_chain(context, files)
    if files.ca_file is not None:
        try:
            context.load_verify_locations(files.ca_file)
        except (OSError, ValueError) as error:
            raise CertificatesUnusable(f"{files.ca_file}: {_reason(error, 'certificate')}") from None
        context.verify_mode = ssl.CERT_REQUIRED if requires_client_certificate else ssl.CERT_OPTIONAL
    return context


def _load_chain(context: ssl.SSLContext, files: TlsFiles) -> None:
    if files.cert_file is None:
        return
    try:
        context.load_cert_chain(files.cert_file, files.key_file, password="")  # empty, so that it does not prompt
    except (OSError, ValueError) as error:
        raise CertificatesUnusable(_why_no_chain(files, error)) from None


def _why_no_chain(files: TlsFiles, error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"{files.key_file or files.cert_file}: the key is not that of the certificate in {files.cert_file}"
    names = " and ".join(str(path) for path in (files.cert_file, files.key_file) if path is not None)
    return f"{names}: {_reason(error, 'certificate with its unencrypted key')}"


def _reason(error: Exception, wanted: str) -> str:
    """Return what is wrong. OpenSSL does not say which of two files it could not read."""
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    return f"there is no {wanted} in PEM"


class ReloadedContext(ssl.SSLContext):
    """A context whose connections use what is in the files now."""

    fault: str | None  # why the content of the files is not in use
    certificate: bytes | None  # the content of the certificate's file that is in use
    reloads: int

    def __new__(cls, files: TlsFiles, make: Callable[[TlsFiles], ssl.SSLContext]) -> Self:  # noqa: ARG004 - see __init__
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)  # its own settings are never used

    def __init__(self, files: TlsFiles, make: Callable[[TlsFiles], ssl.SSLContext]) -> None:
        """Raise CertificatesUnusable if the files cannot be used now."""
        self._files = files
        self._make = make
        self._tried = _read(files)
        self._read_at_s = monotonic()
        self._current = make(files)
        self.certificate = self._tried[1]
        self.fault = None
        self.reloads = 0

    def refresh(self) -> None:
        """Make another context if the files have changed. It looks at most once in REREAD_S."""
        if monotonic() < self._read_at_s + REREAD_S:
            return
        self._read_at_s = monotonic()
        try:
            content = _read(self._files)
            if content == self._tried and self.fault is None:
                return
            self._current = self._make(self._files)
        except CertificatesUnusable as error:
            self.fault = str(error)
            return
        if content != self._tried:
            self.reloads += 1
        self._tried, self.certificate, self.fault = content, content[1], None

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        self.refresh()
        return self._current.wrap_bio(*args, **kwargs)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        self.refresh()
        return self._current.wrap_socket(*args, **kwargs)


def _read(files: TlsFiles) -> tuple[bytes | None, ...]:
    try:
        return files.read()
    except OSError as error:
        raise CertificatesUnusable(f"{error.filename}: {error.strerror}") from None
