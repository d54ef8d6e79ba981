"""HTTP: the identity of this installation, which an admin confirms after its database was moved or copied."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field

from coordinator.access.auth import RequireScope, actor_of
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.installation import operations
from coordinator.installation.operations import Installation
from coordinator.installation.rules import addresses_of
from coordinator.settings import CoordinatorSettings
from coordinator.state import CoordinatorDep
from web.bodies import reply
from web.openapi import described
from web.strict_routes import BodyModel

router = APIRouter(tags=["installation"], route_class=IdempotentRoute)
Admin = Annotated[Caller, Depends(RequireScope("admin"))]


class ConfirmBody(BodyModel):
    new_id: Annotated[
        bool,
        Field(description="This database is a copy that becomes an installation of its own.", examples=[False]),
    ] = False


@router.get("/v1/installation", **described(answers={200: Installation}))
async def get_installation(coordinator: CoordinatorDep, _: Admin) -> Response:
    """Return the id that webhooks name, and whether this coordinator sends them."""
    now, addresses = coordinator.clock.now(), _addresses(coordinator.settings)
    return reply(await coordinator.database.run(lambda c: operations.look_at_installation(c, addresses, now)))


@router.post("/v1/installation:confirm", **described(answers={200: Installation}))
async def confirm_installation(
    request: Request, coordinator: CoordinatorDep, caller: Admin, body: ConfirmBody
) -> Response:
    """Confirm that this database is the installation, at this coordinator's address: from now on events are sent."""
    by, now, addresses = actor_of(request, caller), coordinator.clock.now(), _addresses(coordinator.settings)
    return reply(
        await coordinator.database.run(lambda c: operations.confirm_installation(c, addresses, body.new_id, by, now))
    )


def _addresses(settings: CoordinatorSettings) -> frozenset[str]:
    return addresses_of(settings.database_url.get_secret_value(), settings.installation)
