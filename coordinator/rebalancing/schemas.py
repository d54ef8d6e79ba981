"""What people may ask of the division of quotas over regions. With `dry_run` they ask only what would be done."""

from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Body
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from coordinator.http.parameters import Limit, PositiveUnits, QuotaKey, RegionName
from coordinator.rebalancing.rules.region_settings import MAX_WEIGHT
from web.strict_routes import BodyModel


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


class MoveUnits(_RebalanceBody):
    """Move idle units of one allowance from one region to another."""

    mode: Literal["move"]
    quota: QuotaKey
    source: Annotated[RegionName, Field(alias="from")]
    target: Annotated[RegionName, Field(alias="to")]
    units: PositiveUnits


class RegionSettingPatch(BodyModel):
    """What is left out stays as it is, and null removes it. A pin is a floor and a ceiling at once."""

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
    quota: QuotaKey
    settings: Annotated[
        dict[RegionName, RegionSettingPatch],
        Field(min_length=1, max_length=1000, description="By region.", examples=[{"eu-west": {"weight": 2}}]),
    ]


class EvenOut(_RebalanceBody):
    """Move idle units of one allowance to where the demand is."""

    mode: Literal["even_out"]
    quota: QuotaKey


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
