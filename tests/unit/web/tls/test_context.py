"""Contexts follow their files: each connection uses what is in them now, or what was there before if it is no good."""

import ssl
from pathlib import Path

import pytest
from cryptography import x509

from tests.certificates import Authority, Handshake
from web.tls import context as context_module
from web.tls.context import CertificatesUnusable, ReloadedContext, TlsFiles, client_context, server_context


@pytest.fixture(autouse=True)
def look_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_module, "REREAD_S", 0)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def serial_shown(handshake: Handshake) -> int:
    """Return the serial number of the certificate that the server has shown."""
    assert not handshake.failures
    shown = handshake.client.getpeercert(binary_form=True)
    assert shown
    return x509.load_der_x509_certificate(shown).serial_number


def test_a_server_shows_the_certificate_that_is_in_its_file_now(authority: Authority) -> None:
    files = authority.files("server")
    server = ReloadedContext(files, server_context)
    client = ReloadedContext(authority.files("client"), client_context)
    first = serial_shown(Handshake(client, server))
    assert serial_shown(Handshake(client, server)) == first
    assert server.reloads == 0
    authority.issue("server")
    assert serial_shown(Handshake(client, server)) != first
    assert server.reloads == 1


def test_a_client_shows_the_certificate_that_is_in_its_file_now(authority: Authority) -> None:
    server = server_context(authority.files("server"))
    client = ReloadedContext(authority.files("client"), client_context)
    shown = set()
    for _ in range(2):
        handshake = Handshake(client, server)
        shown.add(handshake.server.getpeercert(binary_form=True))
        authority.issue("client")
    assert len(shown) == 2


def test_an_authority_that_is_removed_is_not_trusted_any_more(authority: Authority, tmp_path: Path) -> None:
    """And sessions that its certificates opened are not resumed."""
    other = Authority(tmp_path, "other")
    both = tmp_path / "both.pem"
    both.write_bytes(authority.file.read_bytes() + other.file.read_bytes())
    server = ReloadedContext(authority.files("server")._replace(ca_file=both), server_context)
    clients = [client_context(each.files(f"of-{each.name}", authority)) for each in (authority, other)]
    assert not any(Handshake(client, server).failures for client in clients)
    both.write_bytes(authority.file.read_bytes())
    assert [bool(Handshake(client, server).failures) for client in clients] == [False, True]


def test_files_that_do_not_belong_together_yet_are_not_used(authority: Authority) -> None:
    files = authority.files("server")
    server, client = ReloadedContext(files, server_context), client_context(authority.files("client"))
    first = serial_shown(Handshake(client, server))
    assert files.cert_file is not None
    assert files.key_file is not None
    old_key = files.key_file.read_bytes()
    authority.issue("server")
    new_key = files.key_file.read_bytes()
    files.key_file.write_bytes(old_key)
    assert serial_shown(Handshake(client, server)) == first
    assert server.fault == f"{files.key_file}: the key is not that of the certificate in {files.cert_file}"
    files.key_file.unlink()
    assert serial_shown(Handshake(client, server)) == first
    assert server.fault == f"{files.key_file}: No such file or directory"
    files.key_file.write_bytes(new_key)
    assert serial_shown(Handshake(client, server)) != first
    assert server.fault is None
    assert server.reloads == 1


def test_files_that_cannot_be_used_at_the_start_are_named(authority: Authority, tmp_path: Path) -> None:
    cert_file, key_file = authority.issue("server")
    _, other_key = authority.issue("other")
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("no certificate")
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIGbMFcG\n-----END ENCRYPTED PRIVATE KEY-----\n")
    for files, reason in (
        (TlsFiles(None, cert_file, other_key), "the key is not that of the certificate"),
        (
            TlsFiles(None, no_pem, key_file),
            f"{no_pem} and {key_file}: there is no certificate with its unencrypted key",
        ),
        (TlsFiles(None, cert_file, encrypted), f"{encrypted}: there is no certificate with its unencrypted key"),
        (TlsFiles(None, cert_file), "there is no certificate with its unencrypted key"),
        (TlsFiles(no_pem, cert_file, key_file), f"{no_pem}: there is no certificate in PEM"),
        (TlsFiles(None, tmp_path / "missing", key_file), "missing: No such file or directory"),
    ):
        for make in (server_context, client_context):
            with pytest.raises(CertificatesUnusable) as raised:
                ReloadedContext(files, make)
            assert reason in str(raised.value)


def test_only_the_authorities_of_the_file_are_trusted(authority: Authority) -> None:
    assert {each["subject"] for each in client_context(TlsFiles(authority.file)).get_ca_certs()} == {
        ((("commonName", "authority"),),)
    }
    assert client_context(TlsFiles()).verify_mode is ssl.CERT_REQUIRED
    assert client_context(TlsFiles()).check_hostname
