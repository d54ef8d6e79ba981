"""Scopes: what a token may do. Without a scope it may do nothing.

A region's token speaks for that region and for nothing else, so `admin`, which implies everything that people do,
implies no `region:*`: operators of the coordinator cannot report usage in a region's name.
"""

from collections.abc import Collection

from protocol.identifiers import is_region

SCOPES = (
    "quota:read",
    "quota:write",
    "tenant:write",
    "alloc:write",
    "usage:read",
    "adjust:propose",
    "adjust:approve",
    "period:close",
    "audit:read",
    "admin",
)
REGION_PREFIX = "region:"


def is_scope(text: str) -> bool:
    return text in SCOPES or (text.startswith(REGION_PREFIX) and is_region(text.removeprefix(REGION_PREFIX)))


def allows(held: Collection[str], needed: str) -> bool:
    return needed in held or ("admin" in held and not needed.startswith(REGION_PREFIX))


def region_of(held: Collection[str]) -> str | None:
    """Return the region that a token speaks for, or None unless it is exactly one."""
    regions = [scope.removeprefix(REGION_PREFIX) for scope in held if scope.startswith(REGION_PREFIX)]
    return regions[0] if len(regions) == 1 else None
