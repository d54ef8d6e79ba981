"""Conditional requests: what a client has already is not sent again, and what it has not seen it does not replace."""

import hashlib
import re
from collections.abc import Callable

from fastapi import Request, Response

_TAGS = re.compile(r'(W/)?"([^"]*)"')


def strong_tag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def unless_known(request: Request, response: Response, tag: str, *, for_good: bool = False) -> Response:
    """The response with its ETag, or 304 for a client that has it. What never changes is not asked for again."""
    caching = "private, max-age=31536000, immutable" if for_good else "private, no-cache"
    headers = {"ETag": tag, "Cache-Control": caching, "Vary": "Accept, Authorization"}
    if names_tag(request.headers.get("If-None-Match", ""), tag, weakly=True):
        return Response(status_code=304, headers=headers)
    response.headers.update(headers)
    return response


def expectation(if_match: str | None, tags_of: Callable[[int], list[str]]) -> Callable[[int], bool]:
    """Whether the client knows a version. Without If-Match it does not care."""

    def is_expected(version: int) -> bool:
        return if_match is None or any(names_tag(if_match, tag) for tag in tags_of(version))

    return is_expected


def names_tag(header: str, tag: str, *, weakly: bool = False) -> bool:
    """Whether a header with ETags names this one, or any."""
    if header.strip() == "*":
        return True
    return any(f'"{opaque}"' == tag and (weakly or not weak) for weak, opaque in _TAGS.findall(header))
