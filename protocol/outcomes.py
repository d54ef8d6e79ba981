"""Every answer that is not plain success has a name. Exceptions are for bugs and outages."""

from enum import StrEnum

from protocol.compatibility.open_enums import OpenEnum


class ExchangeOutcome(OpenEnum):
    """The outcome of one numbered exchange. An agent stops the lane for an outcome that it does not know."""

    APPLIED = "applied"  # booked now
    REPLAYED = "replayed"  # booked before, byte for byte; here are the current totals
    STALE = "stale"  # an older one than the last: a slow agent, not a fault
    GAP = "gap"  # newer than the next: the coordinator expects `expected_seq`
    CONFLICT = "conflict"  # the last seq again, with other bytes: the store went back
    STORE_REGRESSED = "store_regressed"  # a total is lower than what the ledger has: the store lost data
    LEDGER_REGRESSED = "ledger_regressed"  # the ledger is behind what it had given: it lost data
    UNKNOWN_EPOCH = "unknown_epoch"  # never issued to this region
    WRONG_FINGERPRINT = "wrong_fingerprint"  # the epoch belongs to another incarnation of the store
    RETIRED = "retired"  # people decided that no more evidence counts
    # It cannot be accepted as it is: unreadable, too large, of another lane. Nothing of it is booked; `fault` says why.
    REFUSED = "refused"


class GrantRefusal(OpenEnum):
    """The reasons why a region was not granted what it wanted. An agent asks again after one that it does not know."""

    UNKNOWN_QUOTA = "unknown_quota"
    NOT_LEASED = "not_leased"  # the quota's kind or mode is not served by leases
    NO_LIMIT = "no_limit"  # the tenant's plan gives none
    PERIOD_NOT_OPEN = "period_not_open"
    EPOCH_FENCED = "epoch_fenced"
    REGION_NOT_ACTIVE = "region_not_active"  # draining, or down
    QUARANTINED = "quarantined"
    LEASE_EXPIRED = "lease_expired"  # it first returns what is left of it; there is hope
    TOTAL_TOO_LARGE = "total_too_large"  # the lease was granted all that a store can count; the next period has another
    EXHAUSTED = "exhausted"  # nothing is left, and no region holds any that could come back
    OVER_BUDGET = "over_budget"  # the region has wanted too many new keys in this minute: ask again later
    INVALID = "invalid"  # the want, rate or slot is malformed: `reason` says where. Asking again unchanged is useless


class DenialReason(StrEnum):
    """The reasons why the store's script did not admit a request. The Lua scripts use the same words."""

    NO_LEASE = "no_lease"
    LEASE_EXPIRED = "lease_expired"
    LEASE_SPENT = "lease_spent"
    RATE_EXCEEDED = "rate_exceeded"
    COST_ABOVE_LIMIT = "cost_above_limit"
    SLOTS_TAKEN = "slots_taken"
    HOLD_NEEDED = "hold_needed"  # said of what is in shadow; the web refuse such a check otherwise


class HoldOutcome(StrEnum):
    """The result of a commit, release or extension of a hold. lua/hold.lua uses the same words."""

    DONE = "done"
    UNKNOWN = "unknown"  # never made in this store, or forgotten, or lost with the store's data
    ENDED = "ended"  # otherwise than what is said now
    TOO_MANY = "too_many"  # more units than can be counted
    NOT_EXTENDED = "not_extended"  # more slots are in use than the region may have by now


class EpochRefusal(StrEnum):
    """The reasons why an epoch was not opened, or does not go on in another incarnation of its store."""

    NONCE_OF_ANOTHER_INCARNATION = "nonce_of_another_incarnation"  # a known nonce with another fingerprint
    REGION_DOWN = "region_down"
    TWO_STORES = "two_stores"  # they replace each other again and again under the region's name
    NOT_ISSUED = "not_issued"  # there is no such epoch of this region and this nonce
    EPOCH_OVER = "epoch_over"  # another was opened since, or people ended it
    ANOTHER_INCARNATION = "another_incarnation"  # it is bound to another incarnation than the store's last one
    STORE_BEHIND = "store_behind"  # the ledger has heard more of it than the store remembers
