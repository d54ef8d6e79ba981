"""Each Lua script as one typed method. Names of keys and order of arguments meet here and nowhere else.

lua/ has the scripts; the header of each is its contract.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from protocol.identifiers import lane_of
from protocol.messages import ExchangeReply, LeaseReply
from regional_agent.store import keys
from regional_agent.store.connection import Argument, StoreConnection, StoreError

LUA = Path(__file__).parent.parent.parent / "lua"
ENOUGH_LINES = 1000


class Fenced(Exception):
    """The store lives another life than the caller thought: look at the fence again."""


class OperationConflict(Exception):
    """The operation_id was used before, with another body."""


class Life(NamedTuple):
    """One life of the store and the epoch that was issued to it."""

    fingerprint: str
    epoch: int
    lanes: int


class Fence(NamedTuple):
    fingerprint: str | None
    nonce: str | None
    epoch: int | None
    lanes: int | None


class AllowanceCharge(NamedTuple):
    quota: str
    cost: int
    limit: int
    dimensions: str  # JSON, keys in order: it names a usage line


class RateCharge(NamedTuple):
    quota: str
    cost: int
    rate_micro: int
    burst: int


Charge = AllowanceCharge | RateCharge


class Operation(NamedTuple):
    digest: str  # of its id, within its tenant
    body: str  # digest of what was asked
    remembered_ms: int


class PolicyDecision(NamedTuple):
    allowed: bool
    reason: str
    limit: int
    remaining: int
    reset_ms: int
    retry_after_ms: int
    available: int
    last_grant: int


@dataclass(frozen=True, slots=True)
class Decision:
    allowed: bool
    replayed: bool
    policies: list[PolicyDecision]


class Frozen(NamedTuple):
    bytes: str
    seq: int
    mono_us: int


class Scripts:
    def __init__(self, store: StoreConnection) -> None:
        self._store = store
        self._source = {path.stem: path.read_bytes() for path in LUA.glob("*.lua")}
        self._sha = {name: hashlib.sha1(source).hexdigest() for name, source in self._source.items()}  # noqa: S324

    async def _run(self, name: str, names: Sequence[bytes], *arguments: Argument) -> Any:
        try:
            return await self._store.call("EVALSHA", self._sha[name], len(names), *names, *arguments)
        except StoreError as error:
            if not str(error).startswith("NOSCRIPT"):
                raise
        # The store does not have the script, so it has not run: sending its source runs it once.
        return await self._store.call("EVAL", self._source[name], len(names), *names, *arguments)

    # --- the life of the store ---------------------------------------------------------------------------------------

    async def read_fence(self) -> Fence:
        fields = await self._store.call("HMGET", keys.FENCE, "fingerprint", "nonce", "epoch", "lanes")
        fingerprint, nonce, epoch, lanes = (None if field is None else field.decode() for field in fields)
        return Fence(fingerprint, nonce, int(epoch) if epoch else None, int(lanes) if lanes else None)

    async def begin_life(self, fingerprint: str, fresh_nonce: str, lost_nonce: str = "") -> Fence:
        answer = await self._run("begin_life", [keys.FENCE], fingerprint, fresh_nonce, lost_nonce)
        nonce, epoch, lanes = (field.decode() for field in answer)
        return Fence(fingerprint, nonce, int(epoch) if epoch else None, int(lanes) if lanes else None)

    async def adopt_epoch(self, fingerprint: str, nonce: str, epoch: int, lanes: int) -> bool:
        names = [keys.FENCE, keys.EPOCHS]
        return bool(await self._run("adopt_epoch", names, fingerprint, nonce, epoch, lanes))

    async def older_epochs(self, life: Life) -> list[Life]:
        """Epochs that this store had before: their evidence is still to be reported."""
        pairs = await self._store.call("HGETALL", keys.EPOCHS)
        known = {int(pairs[i]): int(pairs[i + 1]) for i in range(0, len(pairs), 2)}
        return [Life(life.fingerprint, epoch, lanes) for epoch, lanes in sorted(known.items()) if epoch < life.epoch]

    async def forget_epoch(self, epoch: int) -> None:
        await self._store.call("HDEL", keys.EPOCHS, epoch)

    # --- the hot path ------------------------------------------------------------------------------------------------

    async def check(
        self, life: Life, mode: str, charges: Sequence[Charge], operation: Operation | None = None
    ) -> Decision:
        names, arguments = [keys.FENCE, b"lh:{0}:op:none"], list[Argument]()
        if operation is not None:
            names[1] = keys.operation(lane_of(operation.digest, life.lanes), operation.digest)
        for charge in charges:
            self._add_charge(life, charge, names, arguments)
        body, remembered_ms = (operation.body, operation.remembered_ms) if operation else ("", 0)
        head = (life.fingerprint, life.epoch, mode, body, remembered_ms, len(charges))
        answer = await self._run("check", names, *head, *arguments)
        return _decision(answer)

    @staticmethod
    def _add_charge(life: Life, charge: Charge, names: list[bytes], arguments: list[Argument]) -> None:
        lane = lane_of(charge.quota, life.lanes)
        if isinstance(charge, AllowanceCharge):
            names += (
                keys.lease(lane, life.epoch, charge.quota),
                keys.lines(lane, life.epoch, charge.quota),
                keys.dirty(lane, life.epoch),
            )
            arguments += ("allowance", charge.cost, charge.limit, charge.quota, charge.dimensions, "")
        else:
            names.append(keys.rate(lane, charge.quota))
            arguments += ("rate", charge.cost, charge.rate_micro, charge.burst, "", "")

    # --- leasing and reporting ---------------------------------------------------------------------------------------

    async def give_back(self, life: Life, quota: str, keep: int) -> int:
        lane = lane_of(quota, life.lanes)
        names = [keys.FENCE, keys.lease(lane, life.epoch, quota), keys.dirty(lane, life.epoch)]
        units: int = await self._run("give_back", names, life.fingerprint, life.epoch, quota, keep)
        if units < 0:
            raise Fenced
        return units

    async def dirty(self, life: Life, lane: int, most: int) -> list[str]:
        """Quotas of the lane with something to report, and at most so many."""
        members = await self._store.call("SRANDMEMBER", keys.dirty(lane, life.epoch), most)
        return sorted(member.decode() for member in members)

    async def frozen_seq(self, life: Life, lane: int) -> int | None:
        """The number of the batch that waits for its receipt."""
        seq = await self._store.call("HGET", keys.lane(lane, life.epoch), "frozen_seq")
        return None if seq is None else int(seq)

    async def freeze(self, life: Life, lane: int, quotas: Sequence[str]) -> Frozen:
        names = [keys.FENCE, keys.lane(lane, life.epoch), keys.dirty(lane, life.epoch)]
        for quota in quotas:
            names += (keys.lease(lane, life.epoch, quota), keys.lines(lane, life.epoch, quota))
        answer = await self._run("freeze", names, life.fingerprint, life.epoch, lane, ENOUGH_LINES, *quotas)
        if answer[0] == b"fenced":
            raise Fenced
        return Frozen(answer[1].decode(), answer[2], int(answer[3]))

    async def settle(self, life: Life, lane: int, sent_mono_us: int, reply: ExchangeReply) -> dict[str, int]:
        """Take in a reply whose batch was booked. Gives the units that each quota gained by it."""
        leases = sorted(reply.leases, key=lambda lease: lease.first_minute)  # an old period ends before a new one
        names = [keys.FENCE, keys.lane(lane, life.epoch), keys.dirty(lane, life.epoch)]
        names += [keys.lease(lane, life.epoch, lease.quota) for lease in leases]
        names += [keys.rate(lane, rate.quota) for rate in reply.rates]
        arguments: list[Argument] = [
            life.fingerprint,
            life.epoch,
            reply.seq,
            sent_mono_us,
            len(leases),
            len(reply.rates),
        ]
        for lease in leases:
            arguments += _lease_arguments(lease)
        for rate in reply.rates:
            arguments += (rate.rate_micro, rate.burst, rate.expires_in_ms)
        answer = await self._run("settle", names, *arguments)
        if answer[0] == b"fenced":
            raise Fenced
        gained: dict[str, int] = {}
        for lease, units in zip(leases, answer[2:], strict=False):  # an older epoch's reply installs nothing
            gained[lease.quota] = gained.get(lease.quota, 0) + units
        return gained

    # --- looking -----------------------------------------------------------------------------------------------------

    async def leased(self, life: Life) -> list[str]:
        """Every quota that this epoch has a lease of. It walks all keys: for leaving and for people only."""
        found: set[str] = set()
        cursor = b"0"
        while True:
            pattern = b"lh:{*}:lease:%d:*" % life.epoch
            cursor, names = await self._store.call("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            found |= {name.decode().split(":", 4)[4] for name in names}
            if cursor == b"0":
                return sorted(found)

    async def lease_fields(self, life: Life, quota: str) -> dict[str, str]:
        pairs = await self._store.call("HGETALL", keys.lease(lane_of(quota, life.lanes), life.epoch, quota))
        return {pairs[i].decode(): pairs[i + 1].decode() for i in range(0, len(pairs), 2)}

    async def mono_us(self) -> int:
        return int(await self._store.call("HGET", keys.FENCE, "mono") or 0)


def _lease_arguments(lease: LeaseReply) -> tuple[Argument, ...]:
    return (
        lease.quota,
        lease.period,
        lease.granted,
        lease.overage,
        lease.unallocated,
        lease.expires_in_ms,
        lease.ends_in_ms,
        lease.first_minute,
        lease.last_minute,
        lease.starts_in_ms,
    )


def _decision(answer: list[Any]) -> Decision:
    if answer[0] == b"fenced":
        raise Fenced
    if answer[0] == b"operation_conflict":
        raise OperationConflict
    policies = [PolicyDecision(bool(each[0]), each[1].decode(), *each[2:]) for each in answer[2:]]
    return Decision(bool(answer[1]), answer[0] == b"replayed", policies)
