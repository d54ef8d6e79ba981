"""The binary form of check.lua's replies, and the keys and arguments of its calls."""

import struct
from collections.abc import Iterator, Sequence

from regional_agent.admission.rules.hold_ids import HoldId, HoldTerms
from regional_agent.store import keys
from regional_agent.store.connection import Argument, StoreError
from regional_agent.store.types import (
    OperationConflict,
    Outcome,
    PolicyDecision,
    Run,
    StoreDecision,
    StoreIncarnation,
    StoreRequest,
)

_POLICY = struct.Struct("<B7q")
_OUTCOME_AND_POLICY = struct.Struct("<BB7q")  # of a request with one policy
_HOLD = struct.Struct("<qH")
_DENIED, _ALLOWED, _REPLAYED, _ANOTHER_BODY, _FAILED = range(5)
_LENGTH_BYTES = 2


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
