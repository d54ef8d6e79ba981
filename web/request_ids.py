"""One id per request, from the first byte to the last log line.

A caller may bring its own, so that a trace goes through several programs. It is taken only if it is harmless: it will
be written into headers, logs and problem documents.
"""

import re
import secrets
from collections.abc import Iterator
from typing import Any

HEADER = b"x-request-id"
_HARMLESS = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def new_request_id() -> str:
    return next(_new)


def _drawn() -> Iterator[str]:
    """128 random bits each; drawn by the page, for asking the system costs more than all the rest of an id."""
    while True:
        page = secrets.token_hex(4096)
        for start in range(0, len(page), 32):
            yield page[start : start + 32]


_new = _drawn()


def request_id_of(scope: Any) -> str:
    """The id of an ASGI request: the one it has, the one it brought, or a new one, which it then keeps."""
    state: dict[str, Any] = scope.setdefault("state", {})
    known: str | None = state.get("request_id")
    if known is None:
        brought = next((value for name, value in scope["headers"] if name == HEADER), b"")
        known = state["request_id"] = harmless(brought) or new_request_id()
    return known


def harmless(brought: bytes) -> str | None:
    """An id that a caller brought, if it may be written anywhere."""
    return brought.decode("ascii") if _HARMLESS.fullmatch(brought) else None
