"""The settings of JWTs, which both services have: whose they accept, and what their claims mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, FilePath, Json, model_validator

from web.settings import Settings, variable_of

RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
ELLIPTIC = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512", "Ed25519": "EdDSA"}  # by curve
ASYMMETRIC = (*RSA, *ELLIPTIC.values())


@dataclass(frozen=True)
class JwtTerms:
    """Which JWTs are accepted, and what their claims mean."""

    issuer: str
    audience: str
    keys_url: str  # empty: the issuer's discovery document names it
    algorithms: frozenset[str]
    clock_skew_s: float
    keys_max_age_s: float
    scope_claim: str
    scope_prefix: str
    scope_map: Mapping[str, Sequence[str]] | None
    name_claim: str
    is_scope: Callable[[str], bool]
    ca_file: Path | None = None


class JwtSettings(Settings):
    """The base of settings of a service that accepts JWTs."""

    jwt_issuer: str = Field(
        default="",
        max_length=1000,
        examples=["https://login.example.com/realms/staff"],
        description="Issuer (`iss`) whose JWTs are accepted beside other tokens, as its tokens write it.",
    )
    jwt_audience: str = Field(
        default="",
        max_length=1000,
        examples=["leasehold"],
        description="Audience (`aud`) that JWTs must have. Required with `JWT_ISSUER`.",
    )
    jwt_jwks_url: str = Field(
        default="",
        max_length=1000,
        examples=["https://login.example.com/realms/staff/keys"],
        description=(
            "Address of the issuer's public keys (JWKS). Without it, the `jwks_uri` of "
            "`/.well-known/openid-configuration` below the issuer is used."
        ),
    )
    jwt_ca_file: FilePath | None = Field(
        default=None,
        examples=["/etc/leasehold/issuer-ca.pem"],
        description="Certificates (PEM) that may sign the issuer's, beside those that the machine trusts.",
    )
    jwt_algorithms: str = Field(
        default="RS256 ES256 EdDSA",
        examples=["RS256 ES256 EdDSA"],
        description=f"Algorithms with which JWTs may be signed, separated by spaces: of {', '.join(ASYMMETRIC)}.",
    )
    jwt_clock_skew_ms: int = Field(
        default=30_000,
        ge=0,
        le=300_000,
        examples=[30_000],
        description="Difference of clocks that is allowed when `exp`, `nbf` and `iat` are compared.",
    )
    jwt_keys_max_age_ms: int = Field(
        default=86_400_000,
        ge=60_000,
        le=2_592_000_000,
        examples=[86_400_000],
        description="How long keys are used after they were last fetched, while the issuer cannot be reached.",
    )
    jwt_scope_claim: str = Field(
        default="scope",
        min_length=1,
        max_length=200,
        examples=["realm_access.roles"],
        description="Claim that has the scopes, as a text or a list. Dots lead into objects.",
    )
    jwt_scope_prefix: str = Field(
        default="",
        max_length=200,
        examples=["leasehold:"],
        description="If set, only values with this prefix are scopes, and what follows it is the scope.",
    )
    jwt_scope_map: Json[dict[str, list[str]]] | None = Field(
        default=None,
        examples=['{"finance-team": ["usage:read", "period:close"]}'],
        description="If set, only these values of the claim grant something: the scopes that this JSON object lists.",
    )
    jwt_name_claim: str = Field(
        default="email",
        min_length=1,
        max_length=200,
        examples=["email"],
        description="Claim with the name that the audit shows beside issuer and subject. Dots lead into objects.",
    )

    @staticmethod
    def is_jwt_scope(scope: str) -> bool:
        """Return whether a claim may grant this scope."""
        raise NotImplementedError

    def jwt_terms(self) -> JwtTerms | None:
        """Return which JWTs are accepted, or None if none are."""
        if not self.jwt_issuer:
            return None
        return JwtTerms(
            issuer=self.jwt_issuer,
            audience=self.jwt_audience,
            keys_url=self.jwt_jwks_url,
            algorithms=frozenset(self.jwt_algorithms.split()),
            clock_skew_s=self.jwt_clock_skew_ms / 1000,
            keys_max_age_s=self.jwt_keys_max_age_ms / 1000,
            scope_claim=self.jwt_scope_claim,
            scope_prefix=self.jwt_scope_prefix,
            scope_map=self.jwt_scope_map,
            name_claim=self.jwt_name_claim,
            is_scope=self.is_jwt_scope,
            ca_file=self.jwt_ca_file,
        )

    @model_validator(mode="after")
    def _can_verify_jwts(self) -> Self:
        given = [name for name in JwtSettings.model_fields if name in self.model_fields_set and name != "jwt_issuer"]
        if not self.jwt_issuer and given:
            raise ValueError(f"{self._variable(given[0])} is set without {self._variable('jwt_issuer')}")
        if self.jwt_issuer and not self.jwt_audience:
            raise ValueError(f"{self._variable('jwt_issuer')} is set without {self._variable('jwt_audience')}")
        for name in ("jwt_jwks_url",) if self.jwt_jwks_url else ("jwt_issuer",):
            if self.jwt_issuer and not is_trustworthy(getattr(self, name)):
                raise ValueError(f"{self._variable(name)} must be an https:// address (or http:// of this machine)")
        return self

    @model_validator(mode="after")
    def _knows_its_algorithms_and_scopes(self) -> Self:
        algorithms = self.jwt_algorithms.split()
        if unknown := [each for each in algorithms if each not in ASYMMETRIC]:
            raise ValueError(
                f"{self._variable('jwt_algorithms')} cannot have {unknown[0]!r}: only signatures that need no shared"
                f" secret are accepted, such as {' '.join(ASYMMETRIC[:1])}"
            )
        if not algorithms:
            raise ValueError(f"{self._variable('jwt_algorithms')} names no algorithm")
        if self.jwt_scope_map is not None and self.jwt_scope_prefix:
            both = f"{self._variable('jwt_scope_map')} and {self._variable('jwt_scope_prefix')}"
            raise ValueError(f"{both} are both set; leave one of them out")
        for scope in (each for scopes in (self.jwt_scope_map or {}).values() for each in scopes):
            if not self.is_jwt_scope(scope):
                raise ValueError(f"{self._variable('jwt_scope_map')} has {scope!r}, which is not a scope")
        return self

    def _variable(self, name: str) -> str:
        return variable_of(type(self), name)


def is_trustworthy(url: str) -> bool:
    """Return whether keys from this address are the issuer's, and were not replaced on the way."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme == "https":
            return bool(host)
        return parts.scheme == "http" and (host == "localhost" or ip_address(host).is_loopback)
    except ValueError:
        return False
