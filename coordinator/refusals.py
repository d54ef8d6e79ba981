"""Count and log items that are refused one by one: exchanges, demands, rates and slots."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import structlog
from prometheus_client import Counter

from protocol.messages import ExchangeReply, ItemRefused
from protocol.outcomes import GrantRefusal

LOG_EVERY_S = 10.0
MOST_REMEMBERED = 1000  # regions times kinds times rules; beyond it, they are counted but not logged

log = structlog.get_logger("coordinator.refusals")


class _Logged(NamedTuple):
    at_s: float
    unlogged: int  # since then


class Refusals:
    """One log line for each region, kind and rule in ten seconds. The metric counts all of them."""

    def __init__(self, counter: Counter, monotonic_s: Callable[[], float]) -> None:
        self._counter = counter
        self._monotonic_s = monotonic_s
        self._logged: dict[tuple[str, str, str], _Logged] = {}

    def note_replies(self, region: str, replies: Iterable[ExchangeReply]) -> None:
        for reply in replies:
            if reply.fault is not None:
                self._note(region, "exchange", reply.fault.rule, reply.fault.field, lane=reply.lane, seq=reply.seq)
            self.note_items(region, "demand", reply.refused)

    def note_items(self, region: str, kind: str, refused: Iterable[ItemRefused]) -> None:
        """Note invalid items. `kind`: demand, rate or slot. Refusals that follow from a quota are counted elsewhere."""
        for each in refused:
            if each.refusal is GrantRefusal.INVALID:
                self._note(region, kind, each.rule or "", (each.reason or "").partition(":")[0])

    def _note(self, region: str, kind: str, rule: str, field: str, **about: int | None) -> None:
        self._counter.labels(region, kind, rule).inc()
        name, now_s = (region, kind, rule), self._monotonic_s()
        last = self._logged.get(name)
        if last is not None and now_s < last.at_s + LOG_EVERY_S:
            self._logged[name] = last._replace(unlogged=last.unlogged + 1)
        elif last is not None or len(self._logged) < MOST_REMEMBERED:
            self._logged[name] = _Logged(now_s, 0)
            more = last.unlogged if last else 0
            log.warning("item refused", region=region, kind=kind, rule=rule, field=field, not_logged=more, **about)
