"""Authentication and scopes. Every route checks them before it looks anything up, so no refusal tells what exists.

A request without a token, or with an unknown one, is answered 401. A token that lacks the scope is answered 403. Where
the settings name an issuer, its JWTs are tokens as well.

A region may show a client certificate instead, if a name in it is one of the region's identities. A request with both
is that of a region only if both are of this region.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, NamedTuple

from fastapi import Path, Request

from coordinator.access.authenticate import Caller, Credential
from coordinator.access.rules.audit import Actor
from coordinator.access.rules.scopes import REGION_PREFIX
from coordinator.state import Coordinator, CoordinatorDep
from protocol.compatibility.releases import Peer, is_too_old, peer_of, too_old
from web.credentials.verify_jwt import is_jwt
from web.http_protocol import CLIENT_CERTIFICATE
from web.problems import Problem
from web.request_ids import request_id_of
from web.tls.peers import PeerCertificate
from web.tokens import bearer_token, token_hash


async def caller_of(request: Request, coordinator: CoordinatorDep) -> Caller:
    """Return who sent a request, by its token, its JWT or its client certificate."""
    token, names = _shown_by(request)
    if token is not None and coordinator.jwt_callers is not None and is_jwt(token):
        by_token: Caller | None = await coordinator.jwt_callers.find(token)
        by_name = await _find_all(coordinator, names)
    elif token is not None:
        by_token, *by_name = await _find_all(coordinator, (token_hash(token), *names))
    else:
        by_token, by_name = None, await _find_all(coordinator, names)
    found = _judge(token, by_token, [each for each in by_name if each is not None])
    if found.region is not None:
        coordinator.health.note_seen(found.region, supported_peer(request))
    return found


def _shown_by(request: Request) -> tuple[str | None, Sequence[str]]:
    """Return the token of a request, and the names in its client certificate. Raise a Problem if there are neither."""
    token = bearer_token(request)
    certificate: PeerCertificate | None = getattr(request.state, CLIENT_CERTIFICATE, None)
    if certificate is not None and certificate.is_valid_now:
        if token is None and not certificate.names:
            raise unauthenticated(f"{_WITHOUT_HEADER} The client certificate has no usable name.")
        return token, certificate.names
    if token is None and certificate is not None:
        # The next request comes on a new connection, with the certificate that has replaced this one.
        raise unauthenticated("The client certificate has expired.", {"Connection": "close"})
    if token is None:
        raise unauthenticated(_WITHOUT_HEADER)
    return token, ()


async def _find_all(coordinator: Coordinator, credentials: Iterable[Credential]) -> list[Caller | None]:
    """Find the callers with these credentials in one look-up."""
    return await asyncio.gather(*map(coordinator.callers.find, credentials))


def _judge(token: str | None, by_token: Caller | None, by_name: Sequence[Caller]) -> Caller:
    """Return the caller, given who has the token and who the names in the certificate. Raise a Problem if refused."""
    regions = frozenset(scope for each in by_name for scope in each.scopes)
    if token is None:
        if not by_name:
            raise unauthenticated("No region has a name of this client certificate among its identities.")
        if len(regions) > 1:
            raise Problem("forbidden", "The client certificate has identities of several regions.")
        return by_name[0]
    if by_token is None:
        raise unauthenticated(UNKNOWN)
    held = {scope for scope in by_token.scopes if scope.startswith(REGION_PREFIX)}
    if not regions or not held:
        return by_token
    if not regions <= held:
        raise Problem("forbidden", "The token and the client certificate are of different regions.")
    return by_token._replace(scopes=by_token.scopes - held | regions)


_WITHOUT_HEADER = "Send a token: `Authorization: Bearer <token>`."
UNKNOWN = "The token is unknown or revoked."


def supported_peer(request: Request) -> Peer | None:
    """Return what an agent states about itself. Raise a Problem if it is too old for this release."""
    peer = peer_of(request.headers)
    if peer is not None and is_too_old(peer.release):
        raise Problem("release-unsupported", too_old(f"agent {peer.name!r}", peer.release, "This coordinator"))
    return peer


def unauthenticated(detail: str, headers: Mapping[str, str] = MappingProxyType({})) -> Problem:
    return Problem("unauthenticated", detail, headers={"WWW-Authenticate": "Bearer", **headers})


async def authenticated(request: Request, coordinator: Coordinator) -> Caller:
    """Return the caller that the route has authenticated already, or authenticate it."""
    known: Caller | None = getattr(request.state, "caller", None)
    return known or await caller_of(request, coordinator)


def actor_of(request: Request, caller: Caller) -> Actor:
    """Return the caller as the audit names it."""
    name = str(caller.token_id) if caller.identity is None else f"certificate:{caller.identity}"
    return Actor(name, request_id_of(request.scope))


class RequireScope:
    """A dependency that lets callers with any of these scopes in.

    Use it as `caller: Annotated[Caller, Depends(RequireScope("quota:read"))]`.
    """

    def __init__(self, *scopes: str) -> None:
        self._scopes = scopes

    async def __call__(self, request: Request, coordinator: CoordinatorDep) -> Caller:
        caller = await authenticated(request, coordinator)
        if not any(map(caller.may, self._scopes)):
            raise Problem("forbidden", f"The token lacks the scope {self._named}.")
        return caller

    @property
    def description(self) -> str:
        return f"Requires a token with the scope {self._named}."

    @property
    def _named(self) -> str:
        return " or ".join(f"`{scope}`" for scope in self._scopes)


async def require_this_region(
    request: Request,
    region: Annotated[str, Path(description="The region that the token speaks for.", examples=["eu-west"])],
    coordinator: CoordinatorDep,
) -> str:
    """Return the region in the path, if the token speaks for it. No other scope implies it, not even `admin`."""
    caller = await caller_of(request, coordinator)
    if not caller.may(REGION_PREFIX + region):
        raise Problem("forbidden", "The token or client certificate is not one of the region in the path.")
    return region


class PresumedRegion(NamedTuple):
    """A region whose credentials were valid lately. The request's transaction has to confirm them, except JWTs."""

    name: str
    token_hash: bytes | None
    names: Sequence[str]  # in its client certificate
    peer: Peer | None


async def presume_this_region(
    request: Request,
    region: Annotated[str, Path(description="The region that the token speaks for.", examples=["eu-west"])],
    coordinator: CoordinatorDep,
) -> PresumedRegion:
    """Return the region in the path, if the caller speaks for it, without a look-up of what was found before."""
    token, names = _shown_by(request)
    if token is not None and coordinator.jwt_callers is not None and is_jwt(token):
        await require_this_region(request, region, coordinator)
        return PresumedRegion(region, None, (), supported_peer(request))
    hashed = None if token is None else token_hash(token)
    presumed = map(coordinator.callers.presume, names if hashed is None else (hashed,))
    if not any(caller is not None and caller.may(REGION_PREFIX + region) for caller in presumed):
        await require_this_region(request, region, coordinator)
    return PresumedRegion(region, hashed, names, supported_peer(request))


async def confirm_region(
    request: Request, region: PresumedRegion, is_authentic: bool, coordinator: Coordinator
) -> None:
    """Note that the region was seen, or refuse the request if its transaction has not confirmed the credentials."""
    if is_authentic:
        coordinator.health.note_seen(region.name, region.peer)
        return
    for each in (region.token_hash, *region.names):
        if each is not None:
            coordinator.callers.forget(each)
    await require_this_region(request, region.name, coordinator)  # it says why, unless they are valid again by now
    raise unauthenticated(UNKNOWN)


async def require_a_region(request: Request, coordinator: CoordinatorDep) -> str:
    """Return the one region that the caller speaks for."""
    caller = await caller_of(request, coordinator)
    if caller.region is None:
        raise Problem("forbidden", "The token is not one of a single region.")
    return caller.region
