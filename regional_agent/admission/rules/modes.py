"""The modes of a request, in the words that the store's script, the outage fallback and token slices share.

`enforce` consumes. A request over several cells of a Cluster is peeked first, then held, then spent. So is an `adjust`,
which reports work that was done, whatever the limits say. A `refund` returns units to rates: its costs are negative.
"""

LOOKS = frozenset({"peek", "peek_adjust"})
SETS_ASIDE = frozenset({"hold", "hold_adjust"})
REFUND = "refund"
BEYOND_LIMITS = frozenset({"adjust", "peek_adjust", "hold_adjust", REFUND})
CHANGES_DENIALS = BEYOND_LIMITS - LOOKS  # after one of these, a rate that denied gives sooner or later than it said
