"""HTTP: the block list. People read and change it, and agents wait for its next version."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import Field

from coordinator.access.auth import RequireScope, actor_of, authenticated
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.blocks import operations
from coordinator.blocks.read_blocks import Block, BlockList, tagged_blocks
from coordinator.http.conditions import IfNoneMatch, unless_known
from coordinator.http.parameters import Moment, Reason, Text, faults_of_end
from coordinator.http.polling import PollQuery, Prefer, is_up_to_date, wait_for_signal
from coordinator.state import Coordinator, CoordinatorDep
from protocol.blocks import MAX_BLOCKS, spelt
from protocol.check import BlockField
from web.bodies import reply
from web.openapi import described
from web.problems import Problem, refused, refused_all
from web.strict_routes import BodyModel

router = APIRouter(tags=["catalogue"], route_class=IdempotentRoute)
Writer = Annotated[Caller, Depends(RequireScope("quota:write"))]


class BlockBody(BodyModel):
    """Without `valid_until` the block is in force until it is deleted."""

    field: Annotated[BlockField, Field(strict=False, description="What to block by.", examples=["tenant"])]
    value: Annotated[Text, Field(description="The blocked value; a network for `ip`.", examples=["acme"])]
    reason: Reason
    valid_until: Moment | None = None


async def require_reader(request: Request, coordinator: CoordinatorDep) -> Caller:
    """Let agents in, and people who may read limits."""
    caller = await authenticated(request, coordinator)
    if caller.region is None and not caller.may("quota:read"):
        raise Problem("forbidden", "The token lacks the scope `quota:read`, and is not one of a single region.")
    return caller


Reader = Annotated[Caller, Depends(require_reader)]


@router.get("/v1/blocks", **described(answers={200: BlockList, 304: None}))
async def list_blocks(
    request: Request,
    coordinator: CoordinatorDep,
    caller: Reader,
    query: Annotated[PollQuery, Query()],
    _if_none_match: IfNoneMatch = None,
    _prefer: Prefer = None,
) -> Response:
    """Return all blocks in force, in one page. Requires the scope `quota:read`, or a region's token."""
    with coordinator.hub.subscribe(caller.region or "") as subscription:
        blocks, tag = await _blocks(coordinator)
        is_newest = is_up_to_date(request, query.since, blocks.version, tag)
        if is_newest and await wait_for_signal(request, subscription, "blocks"):
            blocks, tag = await _blocks(coordinator)
    if is_up_to_date(request, query.since, blocks.version, tag):
        return Response(status_code=304, headers={"ETag": tag})
    return unless_known(request, reply(blocks), tag)


async def _blocks(coordinator: Coordinator) -> tuple[BlockList, str]:
    """Return them with their ETag."""
    now = coordinator.clock.now()
    return await coordinator.database.run(lambda c: tagged_blocks(c, now), snapshot=True)


@router.post("/v1/blocks", **described(answers={201: Block, 200: Block, 409: None}))
async def put_block(request: Request, coordinator: CoordinatorDep, caller: Writer, body: BlockBody) -> Response:
    """Deny a subject in every region within a second.

    A block of the same field and value is changed, and the answer is 200.
    """
    by, now = actor_of(request, caller), coordinator.clock.now()
    if faults := faults_of_end(now, body.valid_until, now):
        raise refused_all(faults)
    wanted = operations.BlockRequest(body.field, _spelt(body.field, body.value), body.reason, body.valid_until)
    put = await coordinator.database.run(lambda c: operations.put_block(c, wanted, by, now))
    if put.block is None:
        raise Problem("full", f"There are {MAX_BLOCKS} blocks, which is the maximum. Delete some, or block networks.")
    return reply(put.block, 201 if put.is_new else 200)


@router.delete("/v1/blocks/{field}/{value:path}", **described(answers={204: None, 404: None}))
async def delete_block(
    request: Request,
    field: Annotated[str, Path(description="What the block is by.", examples=["tenant"])],
    value: Annotated[str, Path(description="The blocked value.", examples=["acme"])],
    coordinator: CoordinatorDep,
    caller: Writer,
) -> Response:
    """Delete a block: its subject is let in again in every region within a second."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    if field not in set(BlockField):
        raise Problem("not-found", f"There are no blocks by {field!r}.")
    kind = BlockField(field)
    text = _spelt(kind, value)
    if not await coordinator.database.run(lambda c: operations.delete_block(c, kind, text, by, now)):
        raise Problem("not-found", "There is no such block.")
    return Response(status_code=204)


def _spelt(field: BlockField, value: str) -> str:
    try:
        return spelt(field, value)
    except ValueError as error:
        raise refused("value", "format", str(error)) from error
