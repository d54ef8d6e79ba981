"""Each fault of a TLS connection has words and a code, at the side that finds it and at the other one."""

import ssl
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from tests.certificates import DAY, Authority, Handshake
from web.tls.context import TlsFiles, client_context, server_context
from web.tls.reasons import code_of, describe, tls_error_in

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


def wrong_authority(good: Authority, other: Authority) -> Contexts:
    return client_context(TlsFiles(other.file)), server_context(good.files("server")._replace(ca_file=None))


def wrong_name(good: Authority, _: Authority) -> Contexts:
    files = good.files("server", hosts=("elsewhere.example",))
    return client_context(good.files("client")), server_context(files)


def expired_server(good: Authority, _: Authority) -> Contexts:
    return client_context(good.files("client")), server_context(good.files("server", ends_in=-DAY))


def no_client_certificate(good: Authority, _: Authority) -> Contexts:
    return client_context(TlsFiles(good.file)), server_context(good.files("server"))


def expired_client(good: Authority, _: Authority) -> Contexts:
    return client_context(good.files("client", ends_in=-timedelta(hours=1))), server_context(good.files("server"))


def client_of_another_authority(good: Authority, other: Authority) -> Contexts:
    return client_context(other.files("client", good)), server_context(good.files("server"))


@pytest.mark.parametrize(
    ("contexts", "finder", "code", "words", "others_words"),
    [
        (wrong_authority, "client", "untrusted_authority", "not signed by a trusted authority", "does not trust"),
        (wrong_name, "client", "wrong_name", "for another name (IP address mismatch", "refuses our certificate"),
        (expired_server, "client", "expired", "its certificate has expired", "our certificate has expired"),
        (no_client_certificate, "server", "no_certificate", "the client showed no", "requires a client certificate"),
        (expired_client, "server", "expired", "its certificate has expired", "our certificate has expired"),
        (client_of_another_authority, "server", "untrusted_authority", "not signed by a trusted", "does not trust"),
    ],
)
def test_both_sides_say_what_is_wrong(
    tmp_path: Path,
    contexts: Callable[[Authority, Authority], Contexts],
    finder: str,
    code: str,
    words: str,
    others_words: str,
) -> None:
    failures = Handshake(*contexts(Authority(tmp_path), Authority(tmp_path, "other"))).failures
    found = failures[finder]
    assert code_of(found) == code
    assert words in describe(found)
    other = failures["server" if finder == "client" else "client"]
    assert others_words in describe(other)
    assert code_of(other) != "other"


def test_the_error_behind_others_is_found() -> None:
    outer, inner = httpx.ConnectError("failed"), ssl.SSLError(1, "handshake")
    outer.__cause__ = inner
    assert tls_error_in(outer) is inner
    circle = ValueError()
    circle.__cause__ = circle
    assert tls_error_in(circle) is None


def test_an_unknown_reason_is_passed_on() -> None:
    error = ssl.SSLError(1, "strange things")
    assert "strange things" in describe(error)
    assert code_of(error) == "other"
