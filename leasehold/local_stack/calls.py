"""HTTP calls to our own services with the standard library alone, so that the launcher starts quickly."""

import http.client
import json
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TIMEOUT_S = 10


class HttpReply(NamedTuple):
    status: int
    body: Any  # decoded JSON, or None


def call(
    method: str, url: str, *, token: str | None = None, body: object = None, timeout_s: float = TIMEOUT_S
) -> HttpReply:
    """Send one request on a connection of its own. Raise OSError if no server answers."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request(method, target, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return HttpReply(answer.status, _decoded(answer.read()))
    except http.client.HTTPException as error:
        raise ConnectionError(f"{parts.hostname}:{parts.port} does not answer in HTTP") from error
    finally:
        connection.close()


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def is_ready(url: str) -> bool:
    return why_not_ready(url) is None


def why_not_ready(url: str) -> str | None:
    """Return the service's own reason, or None if it is ready."""
    try:
        answer = call("GET", f"{url}/readyz")
    except OSError as error:
        return str(error)
    return None if answer.status == 200 else detail_of(answer)


def detail_of(answer: HttpReply) -> str:
    """Return the detail of a problem document, or the reasons of an agent that is not ready."""
    if not isinstance(answer.body, dict):
        return f"status {answer.status}"
    if "reasons" in answer.body:
        return "; ".join(str(reason["text"]) for reason in answer.body["reasons"])
    return str(answer.body.get("detail"))
