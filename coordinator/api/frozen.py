"""From the body of a call to exchanges that can be judged. All that is malformed is refused here, before any SQL."""

from collections.abc import Iterable, Sequence

from coordinator.domain.exchange import Call, Incoming
from doors.bodies import decode
from doors.problems import InvalidParameter, Problem
from protocol.identifiers import parse_quota_key
from protocol.messages import Exchange, ExchangeRequest, FrozenBatch, FrozenLease, SharesRequest, body_hash
from protocol.periods import period_of
from protocol.units import MAX_UNITS


def call_of(region: str, request: ExchangeRequest) -> Call:
    incoming = [_incoming(index, exchange) for index, exchange in enumerate(request.exchanges)]
    lanes = [(each.batch.epoch, each.batch.lane) for each in incoming]
    faults = [
        *(f for index, each in enumerate(incoming) for f in _faults(index, each)),
        *_twice("exchanges[{}].frozen.lane", lanes, "a lane speaks once in a call"),
    ]
    if faults:
        raise refused(faults)
    return Call(region, request.fingerprint, incoming)


def refused(faults: Sequence[InvalidParameter]) -> Problem:
    return Problem("invalid-request", f"{faults[0].field}: {faults[0].reason}", invalid_parameters=faults)


def _incoming(index: int, exchange: Exchange) -> Incoming:
    batch = decode(exchange.frozen.encode(), FrozenBatch, within=f"exchanges[{index}].frozen")
    return Incoming(batch, body_hash(exchange.frozen), exchange.live)


def faults_of_shares(request: SharesRequest) -> Iterable[InvalidParameter]:
    rates, slots = [rate.quota for rate in request.rates], [slot.quota for slot in request.slots]
    if not rates and not slots:
        yield InvalidParameter("rates", "required", "name a rate, or slots")
    yield from _bad_keys("rates", rates)
    yield from _bad_keys("slots", slots)
    yield from _twice("rates[{}].quota", rates, "it is named twice")
    yield from _twice("slots[{}].quota", slots, "it is named twice")
    for place, quota in enumerate(slots):
        if quota in rates:
            yield InvalidParameter(f"slots[{place}].quota", "unique", "it is named as a rate, too")


def _faults(index: int, incoming: Incoming) -> Iterable[InvalidParameter]:
    frozen, wants = (f"exchanges[{index}].{part}" for part in ("frozen.leases", "live.wants"))
    leases, live = incoming.batch.leases, incoming.live
    yield from _bad_keys(frozen, [lease.quota for lease in leases])
    yield from _bad_keys(wants, [want.quota for want in live.wants])
    yield from _bad_periods(frozen, [lease.period for lease in leases])
    yield from _bad_sums(frozen, leases)
    twice = "it is named twice"
    yield from _twice(frozen + "[{}].quota", [(lease.quota, lease.period) for lease in leases], twice)
    yield from _twice(wants + "[{}].quota", [want.quota for want in live.wants], twice)


def _bad_keys(where: str, quotas: Iterable[str]) -> Iterable[InvalidParameter]:
    for index, quota in enumerate(quotas):
        try:
            parse_quota_key(quota)
        except ValueError as error:
            yield InvalidParameter(f"{where}[{index}].quota", "quota_key", str(error))


def _bad_periods(where: str, periods: Iterable[str]) -> Iterable[InvalidParameter]:
    for index, period in enumerate(periods):
        try:
            period_of(period)
        except ValueError as error:
            yield InvalidParameter(f"{where}[{index}].period", "period", str(error))


def _bad_sums(where: str, leases: Iterable[FrozenLease]) -> Iterable[InvalidParameter]:
    """A store adds them up, and beyond what it can count it rounds. So nothing that is booked makes a larger total."""
    for index, lease in enumerate(leases):
        if lease.granted + lease.overage > MAX_UNITS:
            yield InvalidParameter(f"{where}[{index}].overage", "sum", f"granted and overage make over {MAX_UNITS}")
        if lease.consumed + lease.returned > MAX_UNITS:
            yield InvalidParameter(f"{where}[{index}].returned", "sum", f"consumed and returned make over {MAX_UNITS}")


def _twice(where: str, names: Iterable[object], reason: str) -> Iterable[InvalidParameter]:
    seen: set[object] = set()
    for index, name in enumerate(names):
        if name in seen:
            yield InvalidParameter(where.format(index), "unique", reason)
        seen.add(name)
