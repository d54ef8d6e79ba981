"""Make, hash, read and compare bearer tokens.
A token is 256 random bits. It cannot be guessed, so a plain SHA-256 is enough to store it; slow hashes are for
passwords that people choose. The prefix lets secret scanners, and our own logs, recognise a leaked token.
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
    """Return the token of `Authorization: Bearer …`, or None if there is none, more than one, or another scheme."""
    values = request.headers.getlist("authorization")
    return token_in(values[0]) if len(values) == 1 else None


def token_in(authorization: str) -> str | None:
    found = _BEARER.fullmatch(authorization)
    return found[1] if found else None


def same_token(given: str | None, expected: str) -> bool:
    """Compare tokens in constant time."""
    return given is not None and hmac.compare_digest(token_hash(given), token_hash(expected))
