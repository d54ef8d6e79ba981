"""Normalise routes by the rules of the limits document, the same for policies and for requests.

Two spellings of one route that were compared as they came would make a request unlimited without anybody noticing.
Dot segments are always resolved (RFC 3986, 5.2.4), because clients and servers do that too.
"""

import re

from protocol.limits.document import RouteRules

WILDCARD = "*"
_REST = "x"  # in place of a `*`: a slash or a dot before it ends no route
_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_DOT_SEGMENT = r"/\.{1,2}(?:/|\Z)"


class RouteNormalizer:
    """Normalises routes by one document's rules."""

    def __init__(self, rules: RouteRules) -> None:
        self._rules = rules
        self._ignores_slash = rules.trailing_slash == "ignore"
        self._ignores_case = rules.case == "ignore"
        self._drops_query = rules.query == "drop"
        self._decodes = rules.percent == "decode_unreserved"
        # What a route in its normal form lacks: most routes are searched for these texts, and that is all.
        self._unusual = ["?", "#", "/.", *(["%"] if self._decodes else ()), *(["//"] if rules.merge_slashes else ())]

    def normalize(self, route: str) -> str:
        """Return the route in the form that it is compared and counted in."""
        if self._ignores_case or (self._ignores_slash and route[-1:] == "/"):
            return self._normalized(route)
        for text in self._unusual:
            if text in route:
                return self._normalized(route)
        return route

    def _normalized(self, route: str) -> str:
        path, query = split_query(route)
        if self._decodes:
            path = _ENCODED.sub(_decode_unreserved, path)
        if self._rules.merge_slashes:
            path = re.sub("//+", "/", path)
        if re.search(_DOT_SEGMENT, path):
            path = _resolve_dot_segments(path)
        if self._ignores_slash and len(path) > 1:
            path = path.removesuffix("/")
        if self._ignores_case:
            path = path.lower()
        return path or "/" if self._drops_query else path + query

    def match_form(self, route: str) -> str:
        """Return the form in which a request's normalised route is looked up.

        Where a trailing slash is ignored, all routes are looked up with one: `/v1/*` then matches `/v1` as well,
        because that is the same route as `/v1/`.
        """
        if not route or not self._ignores_slash:
            return route
        path, query = (route, "") if self._drops_query else split_query(route)
        return (path if path[-1:] == "/" else path + "/") + query

    def pattern(self, route: str) -> str:
        """Return the form in which a policy's route is looked up. A `*` at its end stands for any rest."""
        if route.endswith(WILDCARD):
            return self.normalize(route.removesuffix(WILDCARD) + _REST).removesuffix(_REST) + WILDCARD
        return self.match_form(self.normalize(route))


def split_query(route: str) -> tuple[str, str]:
    """Return the path, and the rest from the first `?` or `#` on."""
    found = re.search("[?#]", route)
    return (route, "") if found is None else (route[: found.start()], route[found.start() :])


def has_dot_segments(route: str) -> bool:
    return re.search(_DOT_SEGMENT, _ENCODED.sub(_decode_unreserved, route)) is not None


def _decode_unreserved(found: re.Match[str]) -> str:
    char = chr(int(found[0][1:], 16))
    return char if char in _UNRESERVED else found[0].upper()


def _resolve_dot_segments(path: str) -> str:
    root, *segments = path.split("/")
    kept: list[str] = []
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    if segments[-1] in (".", ".."):
        kept.append("")
    return "/".join([root, *kept])
