"""For those who judge what no report has accounted for: epochs that are over, suspense, and what is kept for them."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta

from coordinator.api.auth import actor_of, require
from coordinator.operations.authenticate import Caller
from coordinator.operations.retire_epoch import RetiredEpoch, retire_epoch
from coordinator.state import TheCoordinator
from doors.bodies import described, read_body, reply
from doors.problems import InvalidParameter, Problem
from protocol.messages import Message

router = APIRouter(tags=["suspense"])
Allocator = Annotated[Caller, Depends(require("alloc:write"))]

Reason = Annotated[
    str, Meta(min_length=1, max_length=1000, pattern=r"\S", description="why, for whoever reads it later")
]


class RetireBody(Message, frozen=True):
    reason: Reason


@router.post("/v1/epochs/{epoch}:retire", **described(body=RetireBody, answers={200: RetiredEpoch, 404: None}))
async def retire_epoch_(request: Request, epoch: str, coordinator: TheCoordinator, caller: Allocator) -> Response:
    """No more evidence of it counts: what still comes is acknowledged and kept. Again: nothing changes."""
    body, by, now = await read_body(request, RetireBody), actor_of(request, caller), coordinator.clock.now()
    number = _number("epoch", epoch)
    retired = await coordinator.database.run(lambda c: retire_epoch(c, number, body.reason, by, now))
    if retired is None:
        raise Problem("not-found", "there is no such epoch")
    return reply(retired)


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        fault = InvalidParameter(name, "format", "it is a whole number")
        raise Problem("invalid-request", f"{name}: {fault.reason}", invalid_parameters=[fault])
    return int(text)
