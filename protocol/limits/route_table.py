"""Find a request's routes among many, at a cost that does not grow with their number.

Exact routes are a table. Wildcards are prefixes in alphabetical order, and each has a link to the longest other one
that it begins with. The prefixes of a route then lie on one chain of links: it begins at the last prefix that is not
behind the route in the alphabet, which bisection finds, and leads from the longest to the shortest. What a wildcard in
the middle has after its `*` is such a table again, for what a route has after the segment that the `*` stands for.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Prefix(NamedTuple, Generic[T]):
    text: str
    things: list[T]  # of all routes that begin so
    beyond: "Routes[T] | None"  # of those that go on so after one segment more
    parent: "_Prefix[T] | None"


class Routes(Generic[T]):
    """Values by route. A `*` at the end of a route stands for any rest, and elsewhere for one segment."""

    def __init__(self, things: Iterable[tuple[str, T]]) -> None:
        self._exact: dict[str, list[T]] = {}
        wild: dict[str, list[tuple[str, T]]] = {}
        for route, thing in things:
            head, star, rest = route.partition("*")
            if star:
                wild.setdefault(head, []).append((rest, thing))
            else:
                self._exact.setdefault(route, []).append(thing)
        self._texts = sorted(wild)
        self._prefixes = self._related(wild)

    def _related(self, wild: dict[str, list[tuple[str, T]]]) -> list[_Prefix[T]]:
        related: list[_Prefix[T]] = []
        above: _Prefix[T] | None = None
        for text in self._texts:
            while above is not None and not text.startswith(above.text):
                above = above.parent
            ended = [thing for rest, thing in wild[text] if not rest]
            going_on = [(rest, thing) for rest, thing in wild[text] if rest]
            above = _Prefix(text, ended, Routes(going_on) if going_on else None, above)
            related.append(above)
        return related

    def exactly(self, route: str) -> list[T]:
        return self._exact.get(route, [])

    def by_wildcard(self, route: str) -> list[T]:
        """Yield the values of all wildcards that match, from the longest prefix to the shortest."""
        place = bisect_right(self._texts, route)
        prefix = self._prefixes[place - 1] if place else None
        while prefix is not None and not route.startswith(prefix.text):
            prefix = prefix.parent
        found: list[T] = []
        while prefix is not None:  # a prefix's own prefix needs no second look
            found += prefix.things
            if prefix.beyond is not None:
                found += prefix.beyond._after_segment(route, len(prefix.text))
            prefix = prefix.parent
        return found

    def _after_segment(self, route: str, begins: int) -> list[T]:
        ends = route.find("/", begins)
        if ends <= begins:  # it is the last one, or empty
            return []
        rest = route[ends:]
        return [*self.exactly(rest), *self.by_wildcard(rest)]
