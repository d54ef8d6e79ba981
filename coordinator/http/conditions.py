"""Conditional requests: a client is not sent what it has, and does not replace what it has not seen."""

import hashlib
import re
from collections.abc import Callable
from typing import Annotated

from fastapi import Header, Request, Response

_TAGS = re.compile(r'(W/)?"([^"]*)"')

IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        description="The ETag of the version that you have read. If another one is current, the answer is 412.",
        examples=['"7"'],
    ),
]
IfNoneMatch = Annotated[
    str | None,
    Header(
        alias="If-None-Match",
        description="The ETag of the version that you have. If it is current, the answer is 304.",
        examples=['"7"'],
    ),
]


def strong_tag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def unless_known(request: Request, response: Response, tag: str, *, is_immutable: bool = False) -> Response:
    """Return the response with its ETag, or 304 for a client that has this version already."""
    caching = "private, max-age=31536000, immutable" if is_immutable else "private, no-cache"
    headers = {"ETag": tag, "Cache-Control": caching, "Vary": "Accept, Authorization"}
    if names_tag(request.headers.get("If-None-Match", ""), tag, weakly=True):
        return Response(status_code=304, headers=headers)
    response.headers.update(headers)
    return response


def expectation(if_match: str | None, tags_of: Callable[[int], list[str]]) -> Callable[[int], bool]:
    """Return a predicate: whether a version is one that the client expects. Without If-Match it expects any."""

    def is_expected(version: int) -> bool:
        return if_match is None or any(names_tag(if_match, tag) for tag in tags_of(version))

    return is_expected


def names_tag(header: str, tag: str, *, weakly: bool = False) -> bool:
    """Return whether a header with ETags names this one, or any."""
    if header.strip() == "*":
        return True
    return any(f'"{opaque}"' == tag and (weakly or not weak) for weak, opaque in _TAGS.findall(header))
