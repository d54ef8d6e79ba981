"""What people may ask of the division of quotas over regions. With `dry_run` they ask only what it would come to."""

from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, UnsetType, field

from coordinator.rebalancing.rules.region_settings import MAX_WEIGHT
from protocol.identifiers import QuotaKey, RegionName
from protocol.limits.document import LimitValue
from protocol.messages import Message
from protocol.units import PositiveUnits

Why = Annotated[str, Meta(min_length=1, max_length=1000, pattern=r"\S", description="kept in the audit")]


class Asked(Message, frozen=True, kw_only=True, tag_field="mode"):
    """What people ask for. With `dry_run` only what it would come to."""

    dry_run: bool = False
    reason: Why | None = None


class MoveUnits(Asked, frozen=True, kw_only=True, tag="move"):
    """Idle units of one allowance, from one region to another."""

    quota: QuotaKey
    source: RegionName = field(name="from")
    target: RegionName = field(name="to")
    units: PositiveUnits


class RegionSettingPatch(Message, frozen=True, kw_only=True):
    """What is not said stays as it is; null takes it away. A pin is a floor and a ceiling at once."""

    weight: Annotated[int, Meta(ge=0, le=MAX_WEIGHT)] | UnsetType | None = UNSET
    floor: LimitValue | UnsetType | None = UNSET
    ceiling: LimitValue | UnsetType | None = UNSET
    pin: LimitValue | UnsetType | None = UNSET


class Weigh(Asked, frozen=True, kw_only=True, tag="weigh"):
    """Weights, floors, ceilings and pins of a quota, or of some of its keys, by region."""

    quota: QuotaKey
    settings: Annotated[dict[RegionName, RegionSettingPatch], Meta(min_length=1, max_length=1000)]


class EvenOut(Asked, frozen=True, kw_only=True, tag="even_out"):
    """Idle units of one allowance to where the demand is."""

    quota: QuotaKey


class Drain(Asked, frozen=True, kw_only=True, tag="drain"):
    """Everything that a region holds comes back, and nothing is granted there any more."""

    region: RegionName


class Restore(Asked, frozen=True, kw_only=True, tag="restore"):
    """The region is granted to again."""

    region: RegionName


RebalanceBody: TypeAlias = MoveUnits | Weigh | EvenOut | Drain | Restore
