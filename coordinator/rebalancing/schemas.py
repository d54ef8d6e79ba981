"""Bodies and views of rebalances."""

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias
from uuid import UUID

from fastapi import Body
from msgspec import UNSET, Struct, field
from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer

from coordinator.access.token_names import TokenName
from coordinator.http.parameters import Limit, PositiveUnits, QuotaNameOrKey, RegionName
from coordinator.rebalancing.rules.plan import Plan, PlannedHold
from coordinator.rebalancing.rules.region_settings import MAX_WEIGHT
from protocol.limits.rates import parse_duration_ms
from web.strict_routes import BodyModel

SHORTEST_HOLD_MS, LONGEST_HOLD_MS = 1_000, 31 * 86_400_000

# --- bodies -----------------------------------------------------------------------------------------------------------


class _RebalanceBody(BodyModel):
    dry_run: Annotated[bool, Field(description="Return the plan, and change nothing.", examples=[True])] = False
    reason: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=1000,
            pattern=r"\S",
            description="Why. It is kept in the audit.",
            examples=["ticket OPS-77"],
        ),
    ] = None


def _is_hold(text: str) -> str:
    if not SHORTEST_HOLD_MS <= parse_duration_ms(text) <= LONGEST_HOLD_MS:
        raise ValueError("write a time between 1s and 31d")
    return text


HoldTime = Annotated[str, AfterValidator(_is_hold)]


class MoveUnits(_RebalanceBody):
    """Move idle units of one allowance from one region to another."""

    mode: Literal["move"]
    quota: QuotaNameOrKey
    source: Annotated[RegionName, Field(alias="from")]
    target: Annotated[RegionName, Field(alias="to")]
    units: PositiveUnits
    hold: Annotated[
        HoldTime | None,
        Field(description="Keep the units in the target for so long, by a floor that ends by itself.", examples=["1h"]),
    ] = None


class RegionSettingPatch(BodyModel):
    """A change of settings: fields left out keep their values, and null removes one. A pin is a floor and a ceiling."""

    weight: Annotated[int | None, Field(ge=0, le=MAX_WEIGHT, description="How often its demand counts.")] = None
    floor: Annotated[Limit | None, Field(description="What is kept for the region.")] = None
    ceiling: Annotated[Limit | None, Field(description="What the region is granted at most.")] = None
    pin: Annotated[Limit | None, Field(description="A floor and a ceiling.")] = None

    @model_serializer(mode="wrap")
    def _only_what_is_set(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if name in self.model_fields_set}


class Weigh(_RebalanceBody):
    """Set weights, floors, ceilings and pins of a quota, or of some of its keys, by region."""

    mode: Literal["weigh"]
    quota: QuotaNameOrKey
    settings: Annotated[
        dict[RegionName, RegionSettingPatch],
        Field(min_length=1, max_length=1000, description="By region.", examples=[{"eu-west": {"weight": 2}}]),
    ]


class EvenOut(_RebalanceBody):
    """Move idle units of one allowance to where the demand is."""

    mode: Literal["even_out"]
    quota: QuotaNameOrKey


class Drain(_RebalanceBody):
    """Recall everything that a region holds, and grant it nothing any more."""

    mode: Literal["drain"]
    region: RegionName


class Restore(_RebalanceBody):
    """Grant to a drained region again."""

    mode: Literal["restore"]
    region: RegionName


AnyRebalance: TypeAlias = MoveUnits | Weigh | EvenOut | Drain | Restore
RebalanceBody = Annotated[AnyRebalance, Body(discriminator="mode")]


# --- views ------------------------------------------------------------------------------------------------------------

RUNNING, CANCELLED = "running", "cancelled"


class Progress(Struct, frozen=True):
    recalled: int  # units to move
    returned: int  # of these, what sources have returned; of a drain, what is accounted for
    regranted: int  # of these, what targets were granted


class RebalanceMove(Struct, frozen=True, kw_only=True):
    quota: str
    period: str
    source: str = field(name="from")
    target: str | None = field(name="to")
    units: int
    returned: int
    regranted: int
    reason: str | None  # why it ended incomplete
    ended_at: datetime | None


class AwaitedRegion(Struct, frozen=True):
    """A region that has units to return or to fetch."""

    region: str
    what: str  # return: units to return; fetch: units that are ready for it
    quota: str
    units: int
    last_seen_at: datetime | None  # when the region last reported this quota


class Rebalance(Struct, frozen=True, kw_only=True):
    id: UUID | None  # null for a plan
    version: int  # for a plan, that of the newest rebalance
    mode: str
    request: dict[str, Any]
    state: str  # planned | running | done | partial | cancelled
    reason: str | None
    plan: Plan
    progress: Progress
    moves: list[RebalanceMove]
    waits_for: list[AwaitedRegion]
    holds: list[PlannedHold] = []  # that are in force
    created_at: datetime
    created_by: str
    created_by_name: TokenName = UNSET
    ended_at: datetime | None
