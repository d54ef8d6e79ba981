"""A share as the store keeps it, for benchmarks and tests that reason about shares without a store.

A share is in force until it expires. Then the region has what it falls back to, and after KEPT_MS its base share, as if
no share had ever been granted. `lua/parts/share.lua` decides by the same rules, and a test compares the two.
"""

from typing import NamedTuple

LATEST_REPLY_MS = 5_000  # a later reply is ignored: it may be older than what was decided since
KEPT_MS = 40_000


class StoredShare(NamedTuple):
    number: int = 0  # 0: none was granted
    rate_micro: int = 0
    after_micro: int = 0
    until_us: int = 0
    kept_until_us: int = 0

    def in_force_micro(self, mono_us: int, base_share_micro: int) -> int:
        if not self.number or mono_us >= self.kept_until_us:
            return base_share_micro
        return self.rate_micro if mono_us < self.until_us else self.after_micro

    def number_at(self, mono_us: int) -> int:
        """Return the number that a report has: a share that is over was never granted."""
        return self.number if mono_us < self.kept_until_us else 0

    def replaced_by(self, granted: "StoredShare", sent_us: int, mono_us: int) -> "StoredShare":
        """Return a newer share, unless it comes too late."""
        is_late = mono_us - sent_us > LATEST_REPLY_MS * 1000
        return self if is_late or granted.number <= self.number_at(mono_us) else granted

    def lowered(self, rate_micro: int) -> "StoredShare":
        """Return the share without what the region does not use. It is never raised this way."""
        return self._replace(rate_micro=min(self.rate_micro, rate_micro), after_micro=min(self.after_micro, rate_micro))


def share_of_grant(number: int, rate_micro: int, after_micro: int, expires_in_ms: int, sent_us: int) -> StoredShare:
    return StoredShare(number, rate_micro, after_micro, sent_us + expires_in_ms * 1000, sent_us + KEPT_MS * 1000)


def kept_micro(requested_micro: int, rate_micro: int, is_contended: bool) -> int:
    """Return what a region keeps of its share where others want more: what it requests itself."""
    return min(requested_micro, rate_micro) if is_contended else rate_micro
