"""Units are integers. One bound holds everywhere: the largest integer that Lua represents exactly."""

from typing import Annotated

from msgspec import Meta

# Lua 5.1 counts in doubles: above this a unit could vanish in the rounding.
MAX_UNITS = 2**53 - 1

Units = Annotated[int, Meta(ge=0, le=MAX_UNITS, description="units, as an integer")]
PositiveUnits = Annotated[int, Meta(ge=1, le=MAX_UNITS, description="units, as an integer above zero")]
# Demand is counted in thousandths of a unit per second, and rates in millionths ("3/hour" is 833 of them), so that
# they stay integers as well.
MilliUnitsPerSecond = Annotated[int, Meta(ge=0, le=MAX_UNITS, description="thousandths of a unit per second")]
MicroUnitsPerSecond = Annotated[int, Meta(ge=0, le=MAX_UNITS, description="millionths of a unit per second")]
Milliseconds = Annotated[int, Meta(ge=0, le=MAX_UNITS, description="a duration in milliseconds")]
