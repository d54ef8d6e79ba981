"""Sampled requests that an exchange is about, by the allowance that they spend: what the exchange's span links to."""

from collections.abc import Iterable

from protocol.traces.trace_context import TraceContext

MOST_KEYS, MOST_OF_A_KEY = 1_000, 8


class PendingUsage:
    """Remembers few requests for each key, and few keys: a trace shows an example, and not every cause."""

    def __init__(self) -> None:
        self._pending: dict[str, list[TraceContext]] = {}

    def note(self, quota: str, context: TraceContext) -> None:
        """Note that a request asks for units of an allowance, or has consumed some."""
        known = self._pending.get(quota)
        if known is None and len(self._pending) < MOST_KEYS:
            self._pending[quota] = [context]
        elif known is not None and context not in known and len(known) < MOST_OF_A_KEY:
            known.append(context)

    def take(self, quotas: Iterable[str]) -> list[TraceContext]:
        """Return the requests that an exchange about these allowances is caused by, once."""
        found = (self._pending.pop(quota, []) for quota in quotas) if self._pending else ()
        return list(dict.fromkeys(context for contexts in found for context in contexts))
