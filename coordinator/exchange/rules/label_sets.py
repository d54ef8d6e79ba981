"""Bound how many sets of labels the ledger tells apart, for each quota key and period.

A service that sends an id of each request as a label would otherwise make a row of each request. Beyond the bound,
usage is booked with OTHER_LABELS: its units stay exact, and only what they were used for is not recorded.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.exchange.rules.balances import Key
from coordinator.exchange.rules.settlement import key_of
from coordinator.exchange.rules.submissions import Matched
from protocol.limits.usage_labels import LABELS, MAX_LABEL_SETS, OTHER_LABELS, sound_labels
from protocol.messages import FrozenLease, UsageLine


class LabelSet(NamedTuple):
    quota: str
    period: str
    labels: str


def reported_label_sets(exchanges: Iterable[Matched]) -> list[LabelSet]:
    """Return the sets of labels of the usage that is to be booked, each once, in the order of its lines."""
    found = dict.fromkeys(
        LabelSet(*key_of(lease), labels)
        for exchange in exchanges
        if exchange.is_applied
        for lease in exchange.exchange.batch.leases
        if key_of(lease) not in exchange.held
        for line in lease.lines
        if (labels := sound_labels(line.dimensions))
    )
    return list(found)


def sets_with_room(unknown: Iterable[LabelSet], counts: Mapping[Key, int]) -> list[LabelSet]:
    """Return the sets to tell apart from now on: the first ones, as far as the bound leaves room."""
    found, made = list[LabelSet](), Counter(counts)
    for each in unknown:
        key = Key(each.quota, each.period)
        if each.labels != OTHER_LABELS and made[key] < MAX_LABEL_SETS:
            made[key] += 1
            found.append(each)
    return found


def with_other_labels(exchanges: Iterable[Matched], told_apart: Collection[LabelSet]) -> list[Matched]:
    """Return the exchanges with OTHER_LABELS in place of all sets that are not told apart."""
    return [_with_other_labels(each, told_apart) for each in exchanges]


def _with_other_labels(matched: Matched, told_apart: Collection[LabelSet]) -> Matched:
    batch = matched.exchange.batch
    leases = [_bounded(lease, told_apart) for lease in batch.leases]
    return matched._replace(exchange=matched.exchange._replace(batch=replace(batch, leases=leases)))


def _bounded(lease: FrozenLease, told_apart: Collection[LabelSet]) -> FrozenLease:
    kept, others = list[UsageLine](), list[UsageLine]()
    for line in lease.lines:
        labels = line.dimensions.get(LABELS)
        is_kept = labels is None or LabelSet(*key_of(lease), labels) in told_apart
        (kept if is_kept else others).append(line)
    return replace(lease, lines=[*kept, *_merged(others)]) if others else lease


def _merged(lines: Iterable[UsageLine]) -> list[UsageLine]:
    """Return lines with OTHER_LABELS, one for each minute and all that they have in common otherwise."""
    units = Counter[tuple[int, tuple[tuple[str, str], ...]]]()
    for line in lines:
        units[line.minute, tuple(sorted((line.dimensions | {LABELS: OTHER_LABELS}).items()))] += line.units
    return [
        UsageLine(minute=minute, dimensions=dict(dimensions), units=total)
        for (minute, dimensions), total in units.items()
    ]
