"""What the claims of a verified JWT mean."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from web.credentials.jwt_settings import JwtTerms

MAX_SUBJECT_CHARS = 255
MAX_NAME_CHARS = 200
MAX_TIME_S = 2**40  # a JWT that lasts longer lasts as long


class JwtIdentity(NamedTuple):
    """Who a verified JWT belongs to, and what it permits."""

    issuer: str
    subject: str
    name: str  # for people to read; empty if the JWT has none
    scopes: frozenset[str]
    expires_at_s: float  # by the clock of the issuer


def identity_of(claims: Mapping[str, Any], terms: JwtTerms) -> JwtIdentity | None:
    """Return the identity that verified claims give, or None if the subject is not fit to name somebody."""
    subject, name = claims["sub"], find_claim(claims, terms.name_claim)
    if not (isinstance(subject, str) and 0 < len(subject) <= MAX_SUBJECT_CHARS and subject.isprintable()):
        return None
    expires_at_s = min(int(claims["exp"]), MAX_TIME_S)
    shown = name[:MAX_NAME_CHARS] if isinstance(name, str) and name.isprintable() else ""
    return JwtIdentity(terms.issuer, subject, shown, frozenset(_scopes(claims, terms)), float(expires_at_s))


def find_claim(claims: Mapping[str, Any], path: str) -> object:
    """Return the claim of this name, or the one to which its dots lead; None if there is none.

    The whole name comes first: some issuers name their claims like addresses, which have dots.
    """
    if path in claims:
        return claims[path]
    found: object = claims
    for name in path.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return found


def _scopes(claims: Mapping[str, Any], terms: JwtTerms) -> Iterator[str]:
    for value in _values(find_claim(claims, terms.scope_claim)):
        if terms.scope_map is not None:
            yield from terms.scope_map.get(value, ())
        elif value.startswith(terms.scope_prefix) and terms.is_scope(value.removeprefix(terms.scope_prefix)):
            yield value.removeprefix(terms.scope_prefix)


def _values(found: object) -> list[str]:
    if isinstance(found, str):
        return found.split()
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []
