"""Which of many routes a request is on, at a cost that does not grow with their number.

Exact routes are a table. Wildcards are prefixes in alphabetical order, and each knows the longest other one that it
begins with. The prefixes of a route then lie on one line of descent: it begins at the last prefix that is not behind
the route in the alphabet, which bisection finds, and leads from the longest to the shortest.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Prefix(NamedTuple, Generic[T]):
    text: str
    things: list[T]
    parent: "_Prefix[T] | None"


class Routes(Generic[T]):
    """Things by route. A route that ends with `*` is a prefix."""

    def __init__(self, things: Iterable[tuple[str, T]]) -> None:
        self._exact: dict[str, list[T]] = {}
        prefixes: dict[str, list[T]] = {}
        for route, thing in things:
            table, key = (prefixes, route[:-1]) if route.endswith("*") else (self._exact, route)
            table.setdefault(key, []).append(thing)
        self._texts = sorted(prefixes)
        self._prefixes = self._related(prefixes)

    def _related(self, prefixes: dict[str, list[T]]) -> list[_Prefix[T]]:
        related: list[_Prefix[T]] = []
        above: _Prefix[T] | None = None
        for text in self._texts:
            while above is not None and not text.startswith(above.text):
                above = above.parent
            above = _Prefix(text, prefixes[text], above)
            related.append(above)
        return related

    def exactly(self, route: str) -> list[T]:
        return self._exact.get(route, [])

    def by_prefix(self, route: str) -> list[T]:
        """From the longest prefix to the shortest."""
        place = bisect_right(self._texts, route)
        prefix = self._prefixes[place - 1] if place else None
        found: list[T] = []
        while prefix is not None:
            if found or route.startswith(prefix.text):  # a prefix's own prefix needs no second look
                found += prefix.things
            prefix = prefix.parent
        return found
