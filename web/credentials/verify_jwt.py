"""Verify JWTs of a company's issuer.

A JWT that was verified is remembered by its hash until it expires, so its next request costs no signature. When the
issuer's keys change, all are forgotten. Why a JWT is refused is in the log and in a metric, and not in the answer.
"""

from collections.abc import Callable
from time import time

import jwt
import structlog
from prometheus_client import CollectorRegistry

from web.credentials.issuer_keys import IssuerKeys, KeysUnavailable, UnknownKey
from web.credentials.jwt_claims import JwtIdentity, identity_of
from web.credentials.jwt_metrics import JwtMetrics
from web.credentials.jwt_settings import JwtTerms
from web.problems import Problem
from web.tokens import token_hash

REMEMBERED = 4_096  # JWTs
LOG_EVERY_S = 1.0  # for each reason
REQUIRED = ("exp", "iss", "aud", "sub")

_log = structlog.get_logger(__name__)

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (jwt.ExpiredSignatureError, "expired"),
    (jwt.ImmatureSignatureError, "not_yet_valid"),
    (jwt.InvalidAudienceError, "audience"),
    (jwt.InvalidIssuerError, "issuer"),
    (jwt.InvalidSignatureError, "signature"),
    (jwt.InvalidAlgorithmError, "algorithm"),
    (UnknownKey, "unknown_key"),
    (KeysUnavailable, "keys_unavailable"),
)


class _Refused(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def is_jwt(token: str) -> bool:
    """Return whether a bearer token has the form of a JWT. Tokens that Leasehold issues have no dots."""
    return token.count(".") == 2


class JwtVerifier:
    def __init__(self, terms: JwtTerms, registry: CollectorRegistry, now_s: Callable[[], float] = time) -> None:
        self._terms = terms
        self._metrics = JwtMetrics(registry)
        self._now_s = now_s
        self._known: dict[bytes, JwtIdentity] = {}  # the one that was verified longest ago is the first
        self._logged_at_s: dict[str, float] = {}
        self.keys = IssuerKeys(terms, self._metrics)
        self.keys.on_change = self._forget_all
        self.on_forgotten: Callable[[], None] = lambda: None

    def find_known(self, token: str) -> JwtIdentity | None:
        """Return the identity of a JWT that was verified before and has not expired."""
        hashed = token_hash(token)
        found = self._known.get(hashed)
        if found is not None and self.has_expired(found):
            del self._known[hashed]
            return None
        return found

    def has_expired(self, identity: JwtIdentity) -> bool:
        return self.last_moment_s(identity) <= self._now_s()

    def last_moment_s(self, identity: JwtIdentity) -> float:
        """Return until when an identity is accepted, by the clock of this machine."""
        return identity.expires_at_s + self._terms.clock_skew_s

    async def verify(self, token: str) -> JwtIdentity:
        """Return the identity of a JWT. Raise a Problem if it is refused, or cannot be verified now.

        It waits, for a bounded time, only if the JWT names an unknown key.
        """
        known = self.find_known(token)
        if known is not None:
            return known
        try:
            try:
                identity = self._verify(token)
            except (UnknownKey, KeysUnavailable):
                self._require_our_issuer(token)
                await self.keys.refresh_for_unknown_key()
                identity = self._verify(token)
        except (jwt.PyJWTError, UnknownKey, KeysUnavailable, _Refused, ValueError) as error:
            raise self._refusal(error) from None
        self._metrics.verified.inc()
        self._remember(token, identity)
        return identity

    def _verify(self, token: str) -> JwtIdentity:
        header = jwt.get_unverified_header(token)
        algorithm = header.get("alg")
        if not isinstance(algorithm, str) or algorithm not in self._terms.algorithms:
            raise jwt.InvalidAlgorithmError
        claims = jwt.decode(
            token,
            self.keys.find(header.get("kid"), algorithm),  # a key of another kind is not found: no key confusion
            algorithms=[algorithm],
            issuer=self._terms.issuer,
            audience=self._terms.audience,
            leeway=self._terms.clock_skew_s,
            options={"require": list(REQUIRED)},
        )
        identity = identity_of(claims, self._terms)
        if identity is None:
            raise _Refused("subject")
        return identity

    def _require_our_issuer(self, token: str) -> None:
        """Refuse a JWT of another issuer before its unknown key leads to a fetch."""
        claims = jwt.decode(token, options={"verify_signature": False})
        if claims.get("iss") != self._terms.issuer:
            raise _Refused("issuer")

    def _remember(self, token: str, identity: JwtIdentity) -> None:
        self._known[token_hash(token)] = identity
        while len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]

    def _forget_all(self) -> None:
        self._known.clear()
        self.on_forgotten()

    def _refusal(self, error: Exception) -> Problem:
        reason = _reason_of(error)
        self._metrics.refused.labels(reason).inc()
        now_s = self._now_s()
        if now_s >= self._logged_at_s.get(reason, 0) + LOG_EVERY_S:
            self._logged_at_s[reason] = now_s
            _log.warning("JWT refused", reason=reason)
        if isinstance(error, KeysUnavailable):
            detail = "The keys of the issuer are not available now, so no JWT can be verified."
            return Problem("issuer-unavailable", detail, headers={"Retry-After": "5"})
        headers = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
        return Problem("unauthenticated", "The JWT is not valid here, or not valid any more.", headers=headers)


def _reason_of(error: Exception) -> str:
    if isinstance(error, _Refused):
        return error.reason
    if isinstance(error, jwt.MissingRequiredClaimError):
        return f"no_{error.claim}"
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "malformed")
