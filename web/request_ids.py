"""One id for each request, from its first byte to its last log line.

A caller may send its own id, so that a request can be followed through several programs. It is accepted only if it is
harmless in headers, logs and problem documents.
"""

import re
import secrets
from typing import Any

HEADER = b"x-request-id"
_HARMLESS = re.compile(rb"[A-Za-z0-9._-]{1,128}")


_unused: list[str] = []


def new_request_id() -> str:
    """Return 128 random bits. Ids are made in batches, for a system call costs more than the rest of an id."""
    if not _unused:
        page = secrets.token_hex(4096)
        _unused.extend(page[start : start + 32] for start in range(0, len(page), 32))
    return _unused.pop()


def request_id_of(scope: Any) -> str:
    """Return the id of an ASGI request: its own, the caller's or a new one, which is kept in its state."""
    state: dict[str, Any] = scope.setdefault("state", {})
    known: str | None = state.get("request_id")
    if known is None:
        brought = next((value for name, value in scope["headers"] if name == HEADER), b"")
        known = state["request_id"] = harmless(brought) or new_request_id()
    return known


def harmless(brought: bytes) -> str | None:
    """Return the id that a caller sent, or None if it is not harmless."""
    return brought.decode("ascii") if _HARMLESS.fullmatch(brought) else None
