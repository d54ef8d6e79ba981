"""For admins: which installation this is, and that a database is it."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta

from coordinator.access.auth import actor_of, require
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.installation.operations import Installation, confirm_installation, look_at_installation
from coordinator.installation.rules import addresses_of
from coordinator.settings import CoordinatorSettings
from coordinator.state import CoordinatorDep
from protocol.messages import Message
from web.bodies import described, read_body, reply

router = APIRouter(tags=["installation"], route_class=IdempotentRoute)
Admin = Annotated[Caller, Depends(require("admin"))]


class ConfirmBody(Message, frozen=True):
    new_id: Annotated[bool, Meta(description="this copy is an installation of its own: give it another id")] = False


@router.get("/v1/installation", **described(answers={200: Installation}))
async def get_installation(coordinator: CoordinatorDep, _: Admin) -> Response:
    """Read the id that webhooks name, and whether this coordinator sends them."""
    now, addresses = coordinator.clock.now(), _addresses(coordinator.settings)
    return reply(await coordinator.database.run(lambda c: look_at_installation(c, addresses, now)))


@router.post("/v1/installation:confirm", **described(body=ConfirmBody, answers={200: Installation}))
async def confirm(request: Request, coordinator: CoordinatorDep, caller: Admin) -> Response:
    """Confirm that this database is the installation, at this coordinator's address: from now on events are sent."""
    body, by, now = await read_body(request, ConfirmBody), actor_of(request, caller), coordinator.clock.now()
    addresses = _addresses(coordinator.settings)
    confirmed = await coordinator.database.run(lambda c: confirm_installation(c, addresses, body.new_id, by, now))
    return reply(confirmed)


def _addresses(settings: CoordinatorSettings) -> frozenset[str]:
    return addresses_of(settings.database_url.get_secret_value(), settings.installation)
