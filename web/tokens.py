"""Bearer tokens: made, hashed, read from a request, compared.

A token is 256 random bits, so there is nothing to guess and a plain SHA-256 is enough to store it by; the slow hashes
are for passwords that people think up. The prefix lets secret scanners, and our own logs, recognise one that strayed.
"""

import hashlib
import hmac
import re
import secrets

from starlette.requests import Request

PREFIX = "lh_"
_BEARER = re.compile(r"bearer +([A-Za-z0-9._~+/-]{1,512}=*)", re.IGNORECASE)


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def token_hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def bearer_token(request: Request) -> str | None:
    """The token of `Authorization: Bearer …`; None without one, with two, or with anything else."""
    values = request.headers.getlist("authorization")
    return token_in(values[0]) if len(values) == 1 else None


def token_in(authorization: str) -> str | None:
    found = _BEARER.fullmatch(authorization)
    return found[1] if found else None


def same_token(given: str | None, expected: str) -> bool:
    """Takes as long for a near miss as for a far one."""
    return given is not None and hmac.compare_digest(token_hash(given), token_hash(expected))
