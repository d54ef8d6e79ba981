"""What is done with a request if all of its policies agree; the store, an agent without one, and slices say it alike.

`enforce` takes. A request over several cells of a Cluster is looked at first, then set aside, then spent, and so is an
`adjust`, which tells of what has happened already, whatever the limits say.
"""

LOOKS = frozenset({"peek", "peek_adjust"})
SETS_ASIDE = frozenset({"hold", "hold_adjust"})
BEYOND_LIMITS = frozenset({"adjust", "peek_adjust", "hold_adjust"})
