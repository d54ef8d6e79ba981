"""Make, hash, read and compare bearer tokens.

A token is 256 random bits. It cannot be guessed, so a plain SHA-256 is enough to store it; slow hashes are for
passwords that people choose. The prefix lets secret scanners, and our own logs, recognise a leaked token.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection

from starlette.requests import Request

PREFIX = "lh_"
_FORM = r"[A-Za-z0-9._~+/-]{1,8192}=*"  # a JWT may be as long
_BEARER = re.compile(f"bearer +({_FORM})", re.IGNORECASE)


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


def is_bearer(text: str) -> bool:
    """Return whether a text can be sent as a bearer token."""
    return re.fullmatch(_FORM, text) is not None


def is_one_of(given: str | None, hashes: Collection[bytes]) -> bool:
    """Compare a token with those that have these hashes, in constant time."""
    if given is None:
        return False
    hashed = token_hash(given)
    return any(hmac.compare_digest(hashed, each) for each in hashes)
