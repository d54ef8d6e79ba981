"""Authentication and scopes. Every route checks them before it looks anything up, so no refusal tells what exists.

A request without a token, or with an unknown one, is answered 401. A token that lacks the scope is answered 403. Where
the settings name an issuer, its JWTs are tokens as well.
"""

from typing import Annotated, NamedTuple

from fastapi import Path, Request

from coordinator.access.authenticate import Caller
from coordinator.access.rules.audit import Actor
from coordinator.access.rules.scopes import REGION_PREFIX
from coordinator.state import Coordinator, CoordinatorDep
from protocol.compatibility.releases import Peer, is_too_old, peer_of, too_old
from web.credentials.verify_jwt import is_jwt
from web.problems import Problem
from web.request_ids import request_id_of
from web.tokens import bearer_token, token_hash


async def caller_of(request: Request, coordinator: CoordinatorDep) -> Caller:
    """Look the token of a request up, or verify it if it is a JWT."""
    token = bearer_token(request)
    if token is None:
        raise unauthenticated(_WITHOUT_HEADER)
    if coordinator.jwt_callers is not None and is_jwt(token):
        found: Caller | None = await coordinator.jwt_callers.find(token)
    else:
        found = await coordinator.callers.find(token_hash(token))
    if found is None:
        raise unauthenticated("The token is unknown or revoked.")
    if found.region is not None:
        coordinator.health.note_seen(found.region, supported_peer(request))
    return found


_WITHOUT_HEADER = "Send a token: `Authorization: Bearer <token>`."


def supported_peer(request: Request) -> Peer | None:
    """Return what an agent states about itself. Raise a Problem if it is too old for this release."""
    peer = peer_of(request.headers)
    if peer is not None and is_too_old(peer.release):
        raise Problem("release-unsupported", too_old(f"agent {peer.name!r}", peer.release, "This coordinator"))
    return peer


def unauthenticated(detail: str) -> Problem:
    return Problem("unauthenticated", detail, headers={"WWW-Authenticate": "Bearer"})


async def authenticated(request: Request, coordinator: Coordinator) -> Caller:
    """Return the caller that the route has authenticated already, or authenticate it."""
    known: Caller | None = getattr(request.state, "caller", None)
    return known or await caller_of(request, coordinator)


def actor_of(request: Request, caller: Caller) -> Actor:
    """Return the caller as the audit names it."""
    return Actor(str(caller.token_id), request_id_of(request.scope))


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
        raise Problem("forbidden", "The token is not one of the region in the path.")
    return region


class PresumedRegion(NamedTuple):
    """A region whose token was valid lately. The request's own transaction has to confirm it, unless it was a JWT."""

    name: str
    token_hash: bytes | None
    peer: Peer | None


async def presume_this_region(
    request: Request,
    region: Annotated[str, Path(description="The region that the token speaks for.", examples=["eu-west"])],
    coordinator: CoordinatorDep,
) -> PresumedRegion:
    """Return the region in the path, if the token speaks for it, without a look-up of a token that was found before."""
    token = bearer_token(request)
    if token is None:
        raise unauthenticated(_WITHOUT_HEADER)
    if coordinator.jwt_callers is not None and is_jwt(token):
        return PresumedRegion(await require_this_region(request, region, coordinator), None, supported_peer(request))
    hashed = token_hash(token)
    caller = coordinator.callers.presume(hashed)
    if caller is None or not caller.may(REGION_PREFIX + region):
        await require_this_region(request, region, coordinator)
    return PresumedRegion(region, hashed, supported_peer(request))


def confirm_region(region: PresumedRegion, is_authentic: bool, coordinator: Coordinator) -> None:
    """Note that the region was seen, or refuse the request if the transaction has not confirmed the token."""
    if not is_authentic:
        assert region.token_hash is not None
        coordinator.callers.forget(region.token_hash)
        raise unauthenticated("The token is unknown or revoked.")
    coordinator.health.note_seen(region.name, region.peer)


async def require_a_region(request: Request, coordinator: CoordinatorDep) -> str:
    """Return the one region that the token speaks for."""
    caller = await caller_of(request, coordinator)
    if caller.region is None:
        raise Problem("forbidden", "The token is not one of a single region.")
    return caller.region
