"""Whether a lease can still admit anything, and for how long, by the fields that the store keeps of it."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Headroom(NamedTuple):
    """The leases of a sample, and those of them that can admit nothing more."""

    leases: int = 0
    dry: int = 0  # spent or expired, with nothing left of an overdraft

    @property
    def is_exhausted(self) -> bool:
        """Return whether at least half of the leases admit nothing: the region denies most of what it is asked."""
        return self.leases > 0 and 2 * self.dry >= self.leases


def headroom_of(leases: Iterable[tuple[Mapping[str, str], int]]) -> Headroom:
    """Count leases and dry leases. Each comes with the store's clock in microseconds."""
    dry = [is_dry(fields, mono_us) for fields, mono_us in leases]
    return Headroom(len(dry), sum(dry))


def is_dry(fields: Mapping[str, str], mono_us: int) -> bool:
    if "period" not in fields:
        return True
    granted, overage, consumed, returned, held, expires, ends, overdraft, owed = (
        int(fields.get(name, "0"))
        for name in ("granted", "overage", "consumed", "returned", "held", "expires", "ends", "overdraft", "owed")
    )
    if mono_us < ends and overdraft - overage - owed > 0:
        return False
    return mono_us >= expires or granted + overage - consumed - returned - held <= 0


def dry_in_s(fields: Mapping[str, str], mono_us: int, demand_milli: int) -> float | None:
    """Return how long a lease can admit its demand if nothing more is granted; None if there is no demand.

    It ends when its units are spent, or when it expires.
    """
    if demand_milli <= 0:
        return None
    if is_dry(fields, mono_us):
        return 0.0
    granted, overage, consumed, returned, held, expires, overdraft, owed = (
        int(fields.get(name, "0"))
        for name in ("granted", "overage", "consumed", "returned", "held", "expires", "overdraft", "owed")
    )
    beyond = max(0, overdraft - overage - owed)
    spent_in_s = 1000 * (granted + overage - consumed - returned - held + beyond) / demand_milli
    return max(0.0, spent_in_s if beyond else min(spent_in_s, (expires - mono_us) / 1_000_000))
