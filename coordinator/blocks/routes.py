"""Who is denied everywhere: a list for people, and the same list for agents, who wait for its next version."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta

from coordinator.access.auth import actor_of, caller_of, require
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.blocks.delete_block import delete_block
from coordinator.blocks.put_block import Wanted, put_block
from coordinator.blocks.read_blocks import Block, Blocks, tagged_blocks
from coordinator.exchange.parsing import refused
from coordinator.http.conditions import unless_known
from coordinator.http.inputs import Moment, Reason, faults_of_end, faults_of_reason
from coordinator.http.polling import a_version, has_it, news
from coordinator.http.queries import INTEGER, Query, with_query
from coordinator.state import Coordinator, CoordinatorDep
from protocol.blocks import MAX_BLOCKS, spelt
from protocol.check import BlockField
from protocol.messages import Message
from web.bodies import described, read_body, reply
from web.problems import InvalidParameter, Problem

router = APIRouter(tags=["catalogue"], route_class=IdempotentRoute)
Writer = Annotated[Caller, Depends(require("quota:write"))]


class BlockBody(Message, frozen=True):
    """Without `valid_until`: until it is deleted."""

    field: BlockField
    value: Annotated[str, Meta(min_length=1, max_length=256)]
    reason: Reason
    valid_until: Moment | None = None


async def require_reader(request: Request, coordinator: CoordinatorDep) -> Caller:
    """Agents, and people who may read limits."""
    caller = await caller_of(request, coordinator)
    if caller.region is None and not caller.may("quota:read"):
        raise Problem("forbidden", "this needs a token with the scope quota:read, or of one region")
    return caller


Reader = Annotated[Caller, Depends(require_reader)]
_SINCE = {"since": ("a version: wait until there is another one, or answer 304 after a while", INTEGER)}


@router.get("/v1/blocks", **with_query(described(answers={200: Blocks, 304: None}), _SINCE))
async def list_blocks(request: Request, coordinator: CoordinatorDep, caller: Reader) -> Response:
    """All that are in force. There are never so many that they would need pages."""
    query = Query(request)
    since = query.one("since", a_version, None)
    query.checked()
    with coordinator.hub.subscribe(caller.region or "") as subscription:
        blocks, tag = await _blocks(coordinator)
        if has_it(request, since, blocks.version, tag):
            await news(subscription, "blocks")
            blocks, tag = await _blocks(coordinator)
    if has_it(request, since, blocks.version, tag):
        return Response(status_code=304)
    return unless_known(request, reply(blocks), tag)


async def _blocks(coordinator: Coordinator) -> tuple[Blocks, str]:
    """Return them with their ETag."""
    now = coordinator.clock.now()
    return await coordinator.database.run(lambda c: tagged_blocks(c, now), snapshot=True)


@router.post("/v1/blocks", **described(body=BlockBody, answers={201: Block, 200: Block, 409: None}))
async def put_block_(request: Request, coordinator: CoordinatorDep, caller: Writer) -> Response:
    """Denied in every region within a second. The same field and value again is the same block: 200."""
    body, by, now = await read_body(request, BlockBody), actor_of(request, caller), coordinator.clock.now()
    if faults := [*faults_of_end(now, body.valid_until, now), *faults_of_reason(body.reason)]:
        raise refused(faults)
    wanted = Wanted(body.field, _spelt(body.field, body.value), body.reason, body.valid_until)
    put = await coordinator.database.run(lambda c: put_block(c, wanted, by, now))
    if put.block is None:
        raise Problem(
            "full", f"there are {MAX_BLOCKS} blocks, and there can be no more; delete some, or block networks"
        )
    return reply(put.block, 201 if put.is_new else 200)


@router.delete("/v1/blocks/{field}/{value:path}", **described(answers={204: None, 404: None}))
async def delete_block_(
    request: Request, field: str, value: str, coordinator: CoordinatorDep, caller: Writer
) -> Response:
    by, now = actor_of(request, caller), coordinator.clock.now()
    if field not in set(BlockField):
        raise Problem("not-found", f"nobody can be blocked by {field!r}")
    kind = BlockField(field)
    text = _spelt(kind, value)
    if not await coordinator.database.run(lambda c: delete_block(c, kind, text, by, now)):
        raise Problem("not-found", "there is no such block")
    return Response(status_code=204)


def _spelt(field: BlockField, value: str) -> str:
    try:
        return spelt(field, value)
    except ValueError as error:
        raise refused([InvalidParameter("value", "format", str(error))]) from error
