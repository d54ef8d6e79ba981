"""Judge whether the store of a new epoch has all that was answered in the one before, where replicas confirmed that.

Such an epoch names its replicas in its fingerprint, and its agents count a reply only once each of them has
acknowledged the writes before it. So one that is promoted has everything, if it is named and goes on with the history
of the primary that the epoch belongs to. The ledger knows which they are, which numbers it has booked, and whether a
store has gone on with the epoch's data already: only one of several copies may.
"""

from collections.abc import Mapping
from typing import NamedTuple

from protocol.identifiers import name_of, replicas_of, store_of
from protocol.messages import OpenEpoch


class PreviousEpoch(NamedTuple):
    """The epoch that a store is said to have kept, as the ledger knows it."""

    nonce: str
    fingerprint: str
    is_current: bool
    lost_data: bool
    last_seqs: Mapping[int, int]  # by lane


def says_whole(request: OpenEpoch) -> bool:
    """Return whether the store is said to have kept all of the epoch before. An older release ignores a proof."""
    return not request.lost_data or request.promoted is not None


def may_be_whole(previous: PreviousEpoch, request: OpenEpoch) -> bool:
    """Return whether the ledger has nothing against a store's word that it kept all of the epoch."""
    named = replicas_of(previous.fingerprint)
    if request.promoted is not None:
        return bool(named) and _proves_whole(previous, request)
    if not named:
        return True
    if store_of(previous.fingerprint) != store_of(request.fingerprint):
        return False
    # The former primary comes back. If another store has all of its epoch, that one has gone on with it since.
    return previous.is_current or previous.lost_data


def _proves_whole(previous: PreviousEpoch, request: OpenEpoch) -> bool:
    promoted = request.promoted
    assert promoted is not None
    known = dict(enumerate(promoted.seqs))
    return (
        previous.is_current
        and promoted.nonce == previous.nonce
        and name_of(request.fingerprint).run_id in replicas_of(previous.fingerprint)
        and promoted.history == name_of(previous.fingerprint).history
        and all(known.get(lane, 0) >= last for lane, last in previous.last_seqs.items())
    )
