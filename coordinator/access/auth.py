"""Who may come in. Every route asks here first, before anything is looked up, so that neither answer tells what exists.

Without a token, or with one that is not known: 401. With a token that lacks the scope: 403.
"""

from collections.abc import Awaitable, Callable

from fastapi import Request

from coordinator.access.authenticate import Caller
from coordinator.access.rules.audit import Actor
from coordinator.access.rules.scopes import REGION_PREFIX
from coordinator.state import CoordinatorDep
from web.problems import Problem
from web.request_ids import request_id_of
from web.tokens import bearer_token, token_hash


async def caller_of(request: Request, coordinator: CoordinatorDep) -> Caller:
    token = bearer_token(request)
    found = await coordinator.callers.find(token_hash(token)) if token else None
    if found is None:
        detail = "the token is not known" if token else "this needs a token: Authorization: Bearer <token>"
        raise Problem("unauthenticated", detail, headers={"WWW-Authenticate": "Bearer"})
    if found.region is not None:
        coordinator.health.note_heard(found.region)
    return found


def actor_of(request: Request, caller: Caller) -> Actor:
    """As the audit names them."""
    return Actor(str(caller.token_id), request_id_of(request.scope))


def require(*scopes: str) -> Callable[[Request, CoordinatorDep], Awaitable[Caller]]:
    """A dependency: `caller: Annotated[Caller, Depends(require("quota:read"))]`. Of several scopes any will do."""

    async def allowed(request: Request, coordinator: CoordinatorDep) -> Caller:
        caller = await caller_of(request, coordinator)
        if not any(map(caller.may, scopes)):
            raise Problem("forbidden", f"this needs a token with the scope {' or '.join(scopes)}")
        return caller

    return allowed


async def require_this_region(request: Request, region: str, coordinator: CoordinatorDep) -> str:
    """The region in the path, which the token must speak for: nothing implies a region's scope, not even `admin`."""
    caller = await caller_of(request, coordinator)
    if not caller.may(REGION_PREFIX + region):
        raise Problem("forbidden", "this needs a token of the region in the path")
    return region


async def require_a_region(request: Request, coordinator: CoordinatorDep) -> str:
    """The one region that the token speaks for."""
    caller = await caller_of(request, coordinator)
    if caller.region is None:
        raise Problem("forbidden", "this needs a token of one region")
    return caller.region
