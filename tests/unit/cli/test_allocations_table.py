"""The live table of allocations breaks no word on any terminal and names the columns that it leaves out."""

from typing import Any

import pytest
from rich.console import Console

from leasehold.cli.operations.regions import ALLOCATION_COLUMNS, NO_ALLOCATIONS, allocation_sections
from leasehold.cli.output import drawn as draw_sections

REGION: dict[str, Any] = {
    "state": "active",
    "outstanding": 1_234_567,
    "consumed": 1_234_567,
    "demand_milli": 123_456,
    "dry_at": "2026-11-18T09:00:00Z",
    "incoming": 1000,
    "suspense": 1000,
    "weight": 1,
    "floor": 100_000,
    "ceiling": 500_000,
    "limit": None,
}
POOL: dict[str, Any] = {
    "quota": "exports:tenant=acme",
    "period": "2026-11",
    "state": "open",
    "mode": "leased",
    "funded": 50_000_000,
    "unallocated": 40_000_000,
    "consumed": 2_469_134,
    "in_transit": 0,
    "suspense": 2000,
    "regions": [REGION | {"region": "us-east"}, REGION | {"region": "ap-southeast"}],
}
QUIET = {"incoming": 0, "suspense": 0, "demand_milli": 0, "dry_at": None}
IDLE = POOL | {"suspense": 0, "regions": [REGION | QUIET | {"region": "us-east", "floor": None, "ceiling": None}]}


def drawn(width: int, *pools: dict[str, Any]) -> list[str]:
    console = Console(width=width, markup=False, force_terminal=False)
    with console.capture() as captured:
        console.print(draw_sections(allocation_sections(list(pools)), ALLOCATION_COLUMNS, NO_ALLOCATIONS, width))
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_each_region_is_a_line_of_whole_words(width: int) -> None:
    heading, columns, unallocated, east, south, *rest = drawn(width, POOL)
    assert heading == "exports:tenant=acme 2026-11"
    assert [line.split()[0] for line in (columns, unallocated, east, south)] == [
        "region",
        "(unallocated,",
        "us-east",
        "ap-southeast",
    ]
    shown = [name for name in ALLOCATION_COLUMNS.names if name in columns]
    assert rest == ([] if len(shown) == len(ALLOCATION_COLUMNS.names) else [rest[0]])
    assert {name for name in ALLOCATION_COLUMNS.names if any(name in line for line in (columns, *rest))} == set(
        ALLOCATION_COLUMNS.names
    )
    assert {"region", "holds", "dry in"} <= set(shown), "the columns that the command is for"
    assert max(map(len, (columns, unallocated, east, south))) <= width


def test_a_wide_terminal_shows_all_columns_but_empty_ones() -> None:
    assert len(drawn(200, POOL)) == 5
    assert drawn(80, IDLE)[1].split() == ["region", "state", "holds", "used", "set"]


def test_limits_of_regions_are_shown() -> None:
    own = IDLE | {"mode": "regional", "regions": [IDLE["regions"][0] | {"limit": 700}]}
    text = "\n".join(drawn(120, own))
    assert "regional" in text
    assert "limit 700" in text


def test_a_table_without_allocations_says_that_there_are_none() -> None:
    assert drawn(80) == [NO_ALLOCATIONS]


def test_columns_are_left_out_in_their_order() -> None:
    rows = [dict.fromkeys(ALLOCATION_COLUMNS.names, "x" * 20)]
    assert ALLOCATION_COLUMNS.fitting(rows, 9 * 22) == (list(ALLOCATION_COLUMNS.names), [])
    assert ALLOCATION_COLUMNS.fitting(rows, 9 * 22 - 1)[1] == ["state"]
    assert ALLOCATION_COLUMNS.fitting(rows, 3 * 22) == (
        ["region", "holds", "dry in"],
        ["state", "used", "set", "suspense", "incoming", "demand/s"],
    )
