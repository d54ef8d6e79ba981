"""Parse what agents send into exchanges and reports that can be decided on, before any SQL.

A message is an envelope with items. The envelope is decoded first and is refused whole: it is no JSON, has no
fingerprint, or has too many items. Then each item is decoded by itself, and a malformed one is refused by itself:

    want, rate, slot    named as `invalid` among the refused, with the reason
    exchange            answered as `refused`, with a fault. Its frozen bytes are one hash, so one malformed lease
                        refuses the whole batch, and the others of the call are booked
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, field

from coordinator.exchange.rules.submissions import ExchangeCall, Submission
from protocol.identifiers import parse_quota_key
from protocol.messages import (
    MAX_DIMENSIONS_LENGTH,
    MAX_EXCHANGES,
    MAX_FROZEN_BYTES,
    MAX_LEASES_PER_EXCHANGE,
    MAX_RATES,
    ExchangeFault,
    ExchangeReply,
    Fingerprint,
    FrozenBatch,
    FrozenLease,
    ItemRefused,
    Lane,
    LeaseDemand,
    RateReport,
    ServiceMessage,
    SharesRequest,
    SlotReport,
    body_hash,
)
from protocol.messages import (
    Sequence as Seq,
)
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from protocol.periods import period_named_outside
from protocol.units import MAX_UNITS
from web.bodies import decode, decode_parts
from web.problems import InvalidParameter, Problem, refused

LONGEST_REASON = 256
ALWAYS_SHORT = 6  # dimensions: so many with the longest names and values are within MAX_DIMENSIONS_LENGTH
TWICE = "it is named twice"

Item = TypeVar("Item", LeaseDemand, RateReport, SlotReport)


# --- envelopes --------------------------------------------------------------------------------------------------------


class _Envelope(ServiceMessage, frozen=True):
    fingerprint: Fingerprint
    exchanges: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MAX_EXCHANGES)]


class _Exchange(ServiceMessage, frozen=True):
    frozen: Annotated[str, Meta(min_length=2, max_length=MAX_FROZEN_BYTES)]
    live: msgspec.Raw = msgspec.Raw(b"{}")


class _Live(ServiceMessage, frozen=True):
    demands: list[msgspec.Raw] = field(default_factory=list)


class _Shares(ServiceMessage, frozen=True):
    rates: Annotated[list[msgspec.Raw], Meta(max_length=MAX_RATES)] = field(default_factory=list)
    slots: Annotated[list[msgspec.Raw], Meta(max_length=MAX_RATES)] = field(default_factory=list)


class _Lane(msgspec.Struct, frozen=True):
    """The lane and number of a batch that is otherwise malformed."""

    lane: Lane
    seq: Seq


class _Name(msgspec.Struct, frozen=True):
    quota: str


class ParsedShares(NamedTuple):
    request: SharesRequest
    refused_rates: Sequence[ItemRefused]
    refused_slots: Sequence[ItemRefused]


# --- exchanges --------------------------------------------------------------------------------------------------------


def parse_exchanges(region: str, body: bytes) -> ExchangeCall:
    """Parse a call's exchanges. Raises a Problem if there is no envelope to be read."""
    envelope = decode_parts(body, _Envelope)
    submissions: list[Submission] = []
    refusals: list[tuple[int, ExchangeReply]] = []
    lanes: set[tuple[int, int]] = set()
    for place, raw in enumerate(envelope.exchanges):
        parsed = _parse_exchange(bytes(raw), lanes)
        if isinstance(parsed, ExchangeReply):
            refusals.append((place, parsed))
        else:
            submissions.append(parsed)
    return ExchangeCall(region, envelope.fingerprint, submissions, refusals)


def _parse_exchange(raw: bytes, lanes: set[tuple[int, int]]) -> Submission | ExchangeReply:
    """Parse one exchange. `lanes`: those that have an exchange in this call already. A valid one's is added."""
    try:
        exchange = decode_parts(raw, _Exchange)
    except Problem as problem:
        return _refuse(_fault_of(problem))
    try:
        batch = decode(exchange.frozen.encode(), FrozenBatch, within="frozen")
    except Problem as problem:
        return _refuse(_fault_of(problem), exchange.frozen)
    if fault := next(_faults(batch, lanes), None):
        return _refuse(fault, exchange.frozen)
    lanes.add((batch.epoch, batch.lane))
    demands, refusals = _parse_demands(bytes(exchange.live))
    return Submission(batch, body_hash(exchange.frozen), demands, refusals)


def _refuse(fault: InvalidParameter, frozen: str = "") -> ExchangeReply:
    """Answer a malformed exchange, with its lane and number where they can be read."""
    named = None
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        named = msgspec.json.decode(frozen, type=_Lane)
    return ExchangeReply(
        outcome=ExchangeOutcome.REFUSED,
        lane=named.lane if named else None,
        seq=named.seq if named else None,
        fault=ExchangeFault(field=fault.field, rule=fault.rule, reason=fault.reason[:LONGEST_REASON]),
    )


def _fault_of(problem: Problem) -> InvalidParameter:
    return problem.invalid_parameters[0]


def _faults(batch: FrozenBatch, lanes: set[tuple[int, int]]) -> Iterator[InvalidParameter]:
    leases = batch.leases
    if (batch.epoch, batch.lane) in lanes:
        yield InvalidParameter("frozen.lane", "unique", "a lane has one exchange in a call")
    for place, lease in enumerate(leases):
        yield from _faults_of_lease(f"frozen.leases[{place}]", lease)
    yield from _twice("frozen.leases[{}].quota", [(lease.quota, lease.period) for lease in leases])


def _faults_of_lease(where: str, lease: FrozenLease) -> Iterator[InvalidParameter]:
    if reason := _fault_of_key(lease.quota):
        yield InvalidParameter(f"{where}.quota", "quota_key", reason)
    try:
        period_named_outside(lease.period)
    except ValueError as error:
        yield InvalidParameter(f"{where}.period", "period", str(error))
    # A store adds them up, and rounds above MAX_UNITS. So nothing that is booked may make a larger total.
    if lease.granted + lease.overage > MAX_UNITS:
        yield InvalidParameter(f"{where}.overage", "sum", f"granted and overage make over {MAX_UNITS}")
    if lease.consumed + lease.returned > MAX_UNITS:
        yield InvalidParameter(f"{where}.returned", "sum", f"consumed and returned make over {MAX_UNITS}")
    for place, line in enumerate(lease.lines):
        if len(line.dimensions) > ALWAYS_SHORT and _length_of(line.dimensions) > MAX_DIMENSIONS_LENGTH:
            reason = f"names and values have over {MAX_DIMENSIONS_LENGTH} characters"
            yield InvalidParameter(f"{where}.lines[{place}].dimensions", "max_length", reason)


def _length_of(dimensions: Mapping[str, str]) -> int:
    return sum(len(name) + len(value) for name, value in dimensions.items())


def _fault_of_key(quota: str) -> str:
    try:
        parse_quota_key(quota)
    except ValueError as error:
        return str(error)
    return ""


def _twice(where: str, names: Iterable[object]) -> Iterator[InvalidParameter]:
    seen: set[object] = set()
    for index, name in enumerate(names):
        if name in seen:
            yield InvalidParameter(where.format(index), "unique", TWICE)
        seen.add(name)


# --- demands, rates and slots -----------------------------------------------------------------------------------------


def _parse_demands(live: bytes) -> tuple[list[LeaseDemand], list[ItemRefused]]:
    try:
        raws = decode_parts(live, _Live, within="live").demands
    except Problem as problem:
        return [], [_refuse_item("", _fault_of(problem))]
    demands, refusals = _parse_items(raws[:MAX_LEASES_PER_EXCHANGE], LeaseDemand, "live.demands", set())
    too_many = InvalidParameter("live.demands", "max_length", f"at most {MAX_LEASES_PER_EXCHANGE} in an exchange")
    return demands, [*refusals, *(_refuse_item(_name_of(raw), too_many) for raw in raws[MAX_LEASES_PER_EXCHANGE:])]


def parse_shares(body: bytes) -> ParsedShares:
    """Parse the reports of rates and slots. Raises a Problem if there is no envelope, or nothing in it."""
    envelope = decode_parts(body, _Shares)
    if not envelope.rates and not envelope.slots:
        raise refused("rates", "required", "Name a rate, or slots.")
    names: set[str] = set()  # of both: a key is a rate or has slots
    rates, refused_rates = _parse_items(envelope.rates, RateReport, "rates", names)
    slots, refused_slots = _parse_items(envelope.slots, SlotReport, "slots", names)
    return ParsedShares(SharesRequest(rates=rates, slots=slots), refused_rates, refused_slots)


def _parse_items(
    raws: Iterable[msgspec.Raw], type_: type[Item], where: str, names: set[str]
) -> tuple[list[Item], list[ItemRefused]]:
    """Parse each item by itself. `names`: quota keys that were named before; those of valid items are added."""
    items: list[Item] = []
    refusals: list[ItemRefused] = []
    for place, raw in enumerate(raws):
        parsed = _parse_item(raw, type_, f"{where}[{place}]", names)
        if isinstance(parsed, InvalidParameter):
            refusals.append(_refuse_item(_name_of(raw), parsed))
        else:
            names.add(parsed.quota)
            items.append(parsed)
    return items, refusals


def _parse_item(raw: msgspec.Raw, type_: type[Item], where: str, names: set[str]) -> Item | InvalidParameter:
    try:
        item = decode(bytes(raw), type_, within=where)
    except Problem as problem:
        return _fault_of(problem)
    if reason := _fault_of_key(item.quota):
        return InvalidParameter(f"{where}.quota", "quota_key", reason)
    return InvalidParameter(f"{where}.quota", "unique", TWICE) if item.quota in names else item


def _refuse_item(quota: str, fault: InvalidParameter) -> ItemRefused:
    reason = f"{fault.field}: {fault.reason}"[:LONGEST_REASON]
    return ItemRefused(quota=quota, refusal=GrantRefusal.INVALID, rule=fault.rule, reason=reason)


def _name_of(raw: msgspec.Raw) -> str:
    """Return the quota as it was sent, so that the sender can find its item."""
    try:
        return msgspec.json.decode(raw, type=_Name).quota
    except msgspec.DecodeError:
        return ""
