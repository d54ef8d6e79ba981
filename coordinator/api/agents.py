"""For agents: epochs, exchanges, signals and policies. An agent speaks for one region, and only for that."""

from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse

from coordinator.api.auth import require_a_region, require_this_region
from coordinator.api.conditions import etag_of, is_unchanged
from coordinator.api.frozen import call_of, refused
from coordinator.api.queries import Query
from coordinator.domain.granting import Terms
from coordinator.operations.apply_exchange import Applied, WrongLane, apply_exchange
from coordinator.operations.open_epoch import open_epoch
from coordinator.operations.policy_bundle import policy_bundle
from coordinator.signals import Subscription
from coordinator.state import Coordinator, TheCoordinator
from doors.bodies import described, read_body, reply
from doors.problems import InvalidParameter, Problem
from protocol.messages import EpochOpened, ExchangeRequest, ExchangeResponse, OpenEpoch, Signal
from protocol.outcomes import EpochRefusal
from protocol.policy import PolicyBundle

router = APIRouter(tags=["agents"])
