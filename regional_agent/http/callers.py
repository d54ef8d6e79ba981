"""Decide which callers an agent accepts.

An agent that other machines can reach requires its service token. One without a token listens on loopback only, and its
callers are local programs. But a web page in a local browser is one as well, if its domain name resolves to 127.0.0.1
(DNS rebinding). Browsers send the name that they connected to in `Host`, and the calling page in `Origin`: both must be
this machine's.

An agent may have a second token, the adjust token. It permits everything that the service token does, and only its
bearer may book beyond limits: `mode: adjust`, and commits beyond what a hold has set aside.

Of each there may be several, and those in files may change while the agent runs. JWTs of an issuer are accepted beside
them: they may check with the scope `service:check`, and book beyond limits with `service:adjust`. `admit` verifies one;
until then, and when it has expired, its caller is refused.

A service may show a client certificate instead of a token, if the settings have a name in it as an identity. TLS has
verified the certificate at the handshake, so what it permits holds for the connection.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.requests import Request

from protocol.addresses import is_loopback
from regional_agent.settings import ADJUST_SCOPE, CHECK_SCOPE, SERVICE_SCOPES, AgentSettings, tokens_in
from web.credentials.file_secret import READ_EVERY_S
from web.credentials.verify_jwt import JwtVerifier, is_jwt
from web.http_protocol import CLIENT_CERTIFICATE
from web.problems import Problem
from web.tls.peers import PeerCertificate
from web.tokens import is_one_of, token_hash, token_in

Hashes = tuple[bytes, ...]
REQUIRED = "this agent asks for a token: Authorization: Bearer <token>"


class Permission(NamedTuple):
    """The permission of a caller, and the time until which it is valid."""

    may_adjust: bool
    expires_at_s: float = math.inf  # by the clock of the machine


class CallerRules:
    """Decides from a request's headers. The fast path and the framework's routes use the same object."""

    def __init__(self, settings: AgentSettings, jwt_verifier: JwtVerifier | None = None) -> None:
        self._settings = settings
        self._service_tokens, self._adjust_tokens = self._read_tokens()
        self._adjust_identities = frozenset(settings.adjust_identities.split())
        self._identities = self._adjust_identities.union(settings.service_identities.split())
        self._jwt_verifier = jwt_verifier
        self.on_change: list[Callable[[], None]] = []  # called when other callers are accepted than before
        if jwt_verifier is not None:
            jwt_verifier.on_forgotten = self._note_change
        # No browser reaches a unix socket, and clients name any host there.
        self._own_hosts = None if settings.uds else frozenset((settings.host.lower(),))

    def identified(self, certificate: PeerCertificate | None) -> PeerCertificate | None:
        """Return the certificate of a connection if a name in it is an identity here, else None."""
        return certificate if certificate is not None and self._identities.intersection(certificate.names) else None

    def permission(
        self,
        authorization: Sequence[str],
        host: Sequence[str],
        origin: Sequence[str],
        certificate: PeerCertificate | None = None,
    ) -> Permission | Problem:
        """Return what the caller may do, or why it is refused, given the values of three headers.

        `certificate` is what `identified` has returned for the connection. A token takes precedence.
        """
        if certificate is not None and not authorization:
            return self._permission_of_certificate(certificate, origin)
        given = token_in(authorization[0]) if len(authorization) == 1 else None
        if is_one_of(given, self._adjust_tokens):
            return Permission(may_adjust=True)
        if is_one_of(given, self._service_tokens):
            return Permission(self._all_may_adjust)
        if self._jwt_verifier is not None and given is not None and is_jwt(given):
            return self._permission_of_jwt(self._jwt_verifier, given)
        if self._service_tokens or self._jwt_verifier is not None or self._identities:
            return _unauthenticated(REQUIRED)
        return self._why_not_local(host, origin) or Permission(self._all_may_adjust)

    @property
    def _all_may_adjust(self) -> bool:
        """Return whether no caller is named that may do more than others."""
        return not self._adjust_tokens and not self._adjust_identities

    def _permission_of_certificate(self, certificate: PeerCertificate, origin: Sequence[str]) -> Permission | Problem:
        if origin:  # a browser shows its user's certificate for any page
            return Problem("foreign-origin", "A client certificate permits nothing to web pages.")
        if not certificate.is_valid_now:
            return _unauthenticated("The client certificate has expired.", {"Connection": "close"})
        may_adjust = self._all_may_adjust or bool(self._adjust_identities.intersection(certificate.names))
        return Permission(may_adjust, certificate.ends_at_s)

    def _why_not_local(self, host: Sequence[str], origin: Sequence[str]) -> Problem | None:
        if any(not self._is_own(f"//{value}") for value in host):
            return Problem("misdirected", "Without a service token an agent answers only under loopback names.")
        if any(not self._is_own(value) for value in origin):
            return Problem("foreign-origin", "Without a service token an agent answers no page of another origin.")
        return None

    def _permission_of_jwt(self, verifier: JwtVerifier, token: str) -> Permission | Problem:
        identity = verifier.find_known(token)
        if identity is None:
            return _unauthenticated(REQUIRED)
        if not identity.scopes & set(SERVICE_SCOPES):
            return Problem("forbidden", f"The token lacks the scope `{CHECK_SCOPE}`.")
        return Permission(ADJUST_SCOPE in identity.scopes, verifier.last_moment_s(identity))

    def request_may_adjust(self, request: Request) -> bool:
        found = self._permission_of(request)
        return isinstance(found, Permission) and found.may_adjust

    async def admit(self, request: Request) -> None:
        """Verify the JWT of a request, if it has one. Raise the Problem that refuses the caller, if any."""
        await self.verify(request.headers.getlist("authorization"))
        found = self._permission_of(request)
        if isinstance(found, Problem):
            raise found

    def may_become_known(self, authorization: Sequence[str]) -> bool:
        """Return whether `verify` may accept a caller that is refused now: it has a JWT, which is not known yet."""
        return self._jwt_in(authorization) is not None

    async def verify(self, authorization: Sequence[str]) -> None:
        """Verify the JWT of a request, if it has one. Raises Problem."""
        token = self._jwt_in(authorization)
        if token is not None and self._jwt_verifier is not None:
            await self._jwt_verifier.verify(token)

    def _jwt_in(self, authorization: Sequence[str]) -> str | None:
        token = token_in(authorization[0]) if self._jwt_verifier is not None and len(authorization) == 1 else None
        return token if token is not None and is_jwt(token) else None

    def _permission_of(self, request: Request) -> Permission | Problem:
        authorization, host, origin = map(request.headers.getlist, ("authorization", "host", "origin"))
        certificate = self.identified(getattr(request.state, CLIENT_CERTIFICATE, None))
        return self.permission(authorization, host, origin, certificate)

    def _is_own(self, url: str) -> bool:
        if self._own_hosts is None:
            return True
        try:
            name = urlsplit(url).hostname or ""
        except ValueError:
            return False
        return is_loopback(name) or name in self._own_hosts

    @asynccontextmanager
    async def following_files(self) -> AsyncIterator[None]:
        """Read tokens in files again, as long as the block lasts."""
        following = asyncio.create_task(self._follow_files())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow_files(self) -> None:
        while True:
            await asyncio.sleep(READ_EVERY_S)
            found = self._read_tokens()
            if found != (self._service_tokens, self._adjust_tokens):
                self._service_tokens, self._adjust_tokens = found
                self._note_change()

    def _note_change(self) -> None:
        for call in self.on_change:
            call()

    def _read_tokens(self) -> tuple[Hashes, Hashes]:
        settings = self._settings
        service, adjust = (tokens_in(each) for each in (settings.service_token, settings.adjust_token))
        return tuple(map(token_hash, service)), tuple(map(token_hash, adjust))


def adjust_forbidden() -> Problem:
    detail = "Adjustments and commits beyond a hold need the agent's adjust token."
    return Problem("forbidden", detail)


def _unauthenticated(detail: str, headers: Mapping[str, str] = MappingProxyType({})) -> Problem:
    return Problem("unauthenticated", detail, headers={"WWW-Authenticate": "Bearer", **headers})
