"""One id per request, from the first byte to the last log line.

A caller may bring its own, so that a trace goes through several programs. It is taken only if it is harmless: it will
be written into headers, logs and problem documents.
"""

import re
import secrets
from typing import Any

HEADER = b"x-request-id"
_HARMLESS = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def new_request_id() -> str:
    return secrets.token_hex(16)


def request_id_of(scope: Any) -> str:
    """The id of an ASGI request: the one it has, the one it brought, or a new one, which it then keeps."""
    state: dict[str, Any] = scope.setdefault("state", {})
    known: str | None = state.get("request_id")
    if known is None:
        known = state["request_id"] = _brought(scope["headers"]) or new_request_id()
    return known


def _brought(headers: list[tuple[bytes, bytes]]) -> str | None:
    brought = next((value for name, value in headers if name == HEADER), b"")
    return brought.decode("ascii") if _HARMLESS.fullmatch(brought) else None
