"""Calls of check.lua: the checks of one turn of the event loop, batched, encoded, and completed with what it decides.

A script that decides 64 requests costs the store a third of 64 scripts, and one reply costs this process less to read
than many. No request waits for others: a single one is sent at the end of the same turn.

In a Cluster one call serves one slot, so each cell has a batcher of its own.
"""

import asyncio
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

from regional_agent.admission.rules.hold_ids import HoldId, HoldTerms
from regional_agent.store import keys
from regional_agent.store.circuit_breaker import StoreCircuitBreaker
from regional_agent.store.connection import (
    Argument,
    OnReply,
    Reply,
    Store,
    StoreError,
    StoreUnavailable,
    set_result_of,
)
from regional_agent.store.library import StoreLibrary
from regional_agent.store.types import (
    Fenced,
    OperationConflict,
    Outcome,
    PolicyDecision,
    RequestRun,
    Run,
    StoreDecision,
    StoreIncarnation,
    StoreRequest,
)

MAX_REQUESTS = 64  # in one call: the store serves no other client meanwhile
_POLICY = struct.Struct("<B7q")
_OUTCOME_AND_POLICY = struct.Struct("<BB7q")  # of a request with one policy
_HOLD = struct.Struct("<qH")
_DENIED, _ALLOWED, _REPLAYED, _ANOTHER_BODY, _FAILED = range(5)
_LENGTH_BYTES = 2


class SendsChecks(Protocol):
    """Calls of check.lua, or what traces them."""

    def send(self, incarnation: StoreIncarnation, runs: Sequence[Run], on_call: OnReply, /) -> None: ...


class CheckBatcher:
    def __init__(self, calls: SendsChecks, breaker: StoreCircuitBreaker) -> None:
        self._calls = calls
        self._breaker = breaker
        self._incarnation: StoreIncarnation | None = None
        self._runs: list[Run] = []
        self._size = 0  # requests of all runs
        self.newest: Run | None = None  # which was queued last, and has not been sent

    @property
    def room(self) -> int:
        """Return how many requests the next run may have: those that the call has room for, or a whole call's."""
        return MAX_REQUESTS - self._size or MAX_REQUESTS

    def submit(self, incarnation: StoreIncarnation, run: Run) -> None:
        """Queue a run of at most `room` requests. It is completed in a later turn, with all of its outcomes at once."""
        if self._incarnation is not incarnation or self._size + run.times > MAX_REQUESTS:
            self._send()
        if not self._runs:
            self._incarnation = incarnation
            asyncio.get_running_loop().call_soon(self._send)
        self._runs.append(run)
        self._size += run.times
        self.newest = run

    def extend(self, times: int) -> int:
        """Decide the newest run more often, as far as its call has room. Return how often, which its owner counts."""
        fitting = min(times, MAX_REQUESTS - self._size)
        self._size += fitting
        return fitting

    def _send(self) -> None:
        runs, self._runs, self._size, self.newest = self._runs, [], 0, None
        if not runs or self._incarnation is None:
            return
        if self._breaker.allows_calls():
            self._calls.send(self._incarnation, runs, self._breaker.record_reply)
            return
        reason = StoreUnavailable("the store's circuit breaker is open")
        for run in runs:
            run.complete([reason] * run.times)

    async def decide(self, incarnation: StoreIncarnation, request: StoreRequest) -> StoreDecision:
        """Submit one request, and await its decision."""
        future: asyncio.Future[StoreDecision] = asyncio.get_running_loop().create_future()
        on_outcome = set_result_of(future)
        self.submit(incarnation, RequestRun(request, 1, lambda outcomes: on_outcome(outcomes[0])))
        return await future


class CheckCalls:
    """Sends calls of check.lua to one store, or to one cell of a Cluster."""

    def __init__(self, store: Store, library: StoreLibrary, fence_key: bytes) -> None:
        self._store = store
        self._library = library
        self._fence_key = fence_key
        self._function = library.library.functions["check"]

    def send(self, incarnation: StoreIncarnation, runs: Sequence[Run], on_call: OnReply) -> None:
        """Send all runs in one call. Each run gets its outcomes before anything else happens in the event loop.

        `on_call` gets the reply to the call as a whole, before that.
        """
        names, arguments = encode_call(self._fence_key, incarnation, runs)
        call = ("FCALL", self._function, len(names), *names, *arguments)
        self._store.send(call, partial(self._on_reply, call, runs, on_call))

    def _on_reply(
        self, call: tuple[Argument, ...], runs: Sequence[Run], on_call: OnReply, reply: Reply | Exception
    ) -> None:
        """Complete each run with its outcomes: the decisions of the reply, or the reason why there are none."""
        if isinstance(reply, StoreError) and self._library.repeats(
            call, reply, partial(self._on_reply, call, runs, on_call)
        ):
            return
        on_call(reply)
        if isinstance(reply, bytes):
            for run, outcomes in zip(runs, decode_decisions(reply, runs), strict=True):
                run.complete(outcomes)
            return
        reason = reply if isinstance(reply, Exception) else Fenced()
        for run in runs:
            run.complete([reason] * run.times)


def operation_key(incarnation: StoreIncarnation, digest: str) -> bytes:
    return keys.operation(keys.hash_tag(digest, incarnation.lanes, incarnation.cell), digest)


def encode_call(fence: bytes, incarnation: StoreIncarnation, runs: Sequence[Run]) -> tuple[list[bytes], list[Argument]]:
    """Return the keys and arguments of one call of check.lua that decides all runs."""
    names: list[bytes] = [fence]
    arguments: list[Argument] = [incarnation.fingerprint, incarnation.epoch, len(runs)]
    for run in runs:
        request = run.request
        operation, hold = request.operation, request.hold
        if operation is None:
            arguments += (request.mode, run.times, len(request.charges), "")
        else:
            names.append(operation_key(incarnation, operation.digest))
            arguments += (request.mode, run.times, len(request.charges), operation.body, operation.remembered_ms)
        if hold is not None:
            arguments += (str(hold.id), hold.id.name, hold.ttl_ms)
        encoded = request.encoded
        if encoded is None or encoded.incarnation is not incarnation:
            encoded = request.script_args(incarnation)
        names += encoded.names
        arguments += encoded.arguments
    return names, arguments


def decode_decisions(reply: bytes, runs: Sequence[Run]) -> Iterator[Sequence[Outcome]]:
    """Yield the decisions of each run from the packed reply of check.lua."""
    at = 0
    for run in runs:
        request, times = run.request, run.times
        decisions: list[Outcome] = []
        if request.hold is None and len(request.charges) == 1 and reply[at] <= _ALLOWED:  # a run fails as a whole
            for _ in range(times):
                outcome, *policy = _OUTCOME_AND_POLICY.unpack_from(reply, at)
                decisions.append(StoreDecision(outcome != _DENIED, False, [PolicyDecision(*policy)]))
                at += _OUTCOME_AND_POLICY.size
        else:
            for _ in range(times):
                decision, at = _decode_decision(reply, at, request)
                decisions.append(decision)
        yield decisions


def _decode_decision(reply: bytes, at: int, request: StoreRequest) -> tuple[Outcome, int]:
    """Return the decision that begins at an offset, and the offset of the next one."""
    outcome, at = reply[at], at + 1
    if outcome == _ANOTHER_BODY:
        return OperationConflict(), at
    if outcome == _FAILED:
        begin = at + _LENGTH_BYTES
        end = begin + int.from_bytes(reply[at:begin], "little")
        return StoreError(reply[begin:end].decode(errors="replace")), end
    hold = None
    if request.hold is not None and outcome != _DENIED:
        hold, at = _decode_hold(reply, at)
    end = at + _POLICY.size * len(request.charges)
    policies = [PolicyDecision(*_POLICY.unpack_from(reply, begin)) for begin in range(at, end, _POLICY.size)]
    return StoreDecision(outcome != _DENIED, outcome == _REPLAYED, policies, hold), end


def _decode_hold(reply: bytes, at: int) -> tuple[HoldTerms, int]:
    expires_in_ms, length = _HOLD.unpack_from(reply, at)
    begin = at + _HOLD.size
    return HoldTerms(HoldId.parse(reply[begin : begin + length].decode()), expires_in_ms), begin + length
