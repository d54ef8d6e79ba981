"""Ask hosts and services from this machine, each for a bounded time. A probe never raises: what failed is a fact."""

import asyncio
import ssl
from datetime import UTC, datetime
from http import HTTPStatus
from time import perf_counter
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

from leasehold.doctor.facts import AccessFacts, HealthFacts, TlsFacts
from protocol.addresses import is_loopback

DETAIL_LENGTH = 200
UNANSWERED = (httpx.HTTPError, httpx.InvalidURL, OSError)  # TimeoutError is an OSError
_PORTS = {"https": 443, "http": 80}


def port_of(parts: SplitResult) -> int:
    return parts.port or _PORTS.get(parts.scheme, 0)


async def probe_tls(url: str, context: ssl.SSLContext, timeout_s: float) -> TlsFacts:
    """Shake hands with the host of a URL, and read when its certificate expires."""
    parts, now = urlsplit(url), datetime.now(UTC)
    host = parts.hostname or ""
    if parts.scheme != "https":
        return TlsFacts(False, is_loopback(host), None, None, now)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port_of(parts), ssl=context, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        return TlsFacts(True, False, f"the certificate is not accepted: {error.verify_message}", None, now)
    except OSError as error:
        return TlsFacts(True, False, f"no TLS connection: {reason_of(error)}", None, now)
    try:
        certificate = writer.get_extra_info("peercert") or {}
        return TlsFacts(True, False, None, _expiry(certificate), now)
    finally:
        writer.transport.abort()


def _expiry(certificate: dict[str, Any]) -> datetime | None:
    text = certificate.get("notAfter")
    return None if text is None else datetime.fromtimestamp(ssl.cert_time_to_seconds(text), UTC)


async def probe_health(client: httpx.AsyncClient, url: str, timeout_s: float) -> HealthFacts:
    began = perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            answer = await client.get(f"{url}/readyz")
    except UNANSWERED as error:
        return HealthFacts(f"it does not answer: {reason_of(error)}", "", (), 0)
    took_ms = 1000 * (perf_counter() - began)
    found = _decoded(answer)
    if not isinstance(found, dict) or "status" not in found:
        return HealthFacts(f"/readyz answers {answer.status_code}, and not as Leasehold does", "", (), took_ms)
    reasons = tuple(f"{each['code']}: {each['text']}" for each in found.get("reasons", ()))
    return HealthFacts(None, str(found["status"]), reasons, took_ms)


async def read_own_checks(
    client: httpx.AsyncClient, url: str, token: str | None, variable: str, timeout_s: float
) -> tuple[AccessFacts, dict[str, Any]]:
    """Read what a service's own checks found; an empty answer if it does not tell."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with asyncio.timeout(timeout_s):
            answer = await client.get(url, headers=headers)
    except UNANSWERED:
        return AccessFacts(variable, None, "", bool(token)), {}
    found = _decoded(answer)
    body = found if isinstance(found, dict) else {}
    access = AccessFacts(variable, answer.status_code, str(body.get("detail", ""))[:DETAIL_LENGTH], bool(token))
    return access, body if answer.status_code == HTTPStatus.OK else {}


def _decoded(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None


def reason_of(error: BaseException) -> str:
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return "no answer in time"
    return str(error) or type(error).__name__
