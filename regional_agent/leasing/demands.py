"""The allowances that an agent follows, by when each is to be asked for. Nothing here looks at all of them.

A want is *due* at some moment, or never: a heap has the moments. Where nothing is asked, held or leased any more, a
want is *idle*, and the one that has been idle for longest is forgotten when there are too many. If none is idle, a new
allowance is not followed at all: then no lease is asked for it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import islice

from protocol.backoff import Backoff
from protocol.outcomes import GrantRefusal
from regional_agent.leasing.central import Asking
from regional_agent.leasing.rules.demand import Demand
from regional_agent.leasing.rules.refill import FIRST_PAUSE_MS, LONGEST_PAUSE_MS

MOST_KEPT = 10_000  # beyond these, idle ones are forgotten
MOST_FOLLOWED = 50_000
MOST_RECENT = 2_000  # of which the hottest are looked for: what is asked for most was asked for lately
SPARE_ENTRIES = 1_000  # of the heap, beyond twice the wants: those that are out of date


@dataclass(slots=True)
class Want:
    """One allowance, as this agent sees it."""

    quota: str
    demand: Demand
    waiting: int = 0
    wanted: bool = False
    exhausted_until_ms: int = 0  # nothing will come back by itself before that
    refusal: GrantRefusal | None = None  # why, until then
    retry_at_ms: int = 0
    asked_at_ms: int | None = None  # while there is no answer
    renew_at_ms: int | None = None  # while there is a lease
    held: int = 0  # units that services have set aside, as far as is known here
    look_at_ms: int = 0  # at what is held
    postponed_until_ms: int = 0  # its lane pauses, or it is set aside
    backoff: Backoff = field(default_factory=partial(Backoff, FIRST_PAUSE_MS, LONGEST_PAUSE_MS))
    changed: asyncio.Event | None = None  # while somebody waits for news
    asking: Asking | None = None  # of what is central
    hints: int = 0  # how many general hints it has heard of
    is_followed: bool = False
    ticket: int = 0  # of its entry in the heap
    scheduled_ms: int | None = None

    def back_off(self, now_ms: int, ends_in_ms: int = LONGEST_PAUSE_MS) -> None:
        """Pause asking, no longer than the period lasts. A failure during a pause does not prolong it."""
        if not self.backoff.is_pausing(now_ms):
            self.backoff.failed(now_ms, ends_in_ms)

    @property
    def idle(self) -> bool:
        return not self.wanted and not self.waiting and not self.held and self.renew_at_ms is None

    @property
    def due_at_ms(self) -> int | None:
        """When to ask for it: for more, or to go on with what there is."""
        if self.wanted:
            return max(self.retry_at_ms, self.postponed_until_ms)
        moments = [self.renew_at_ms, self.look_at_ms if self.held else None]
        first = min((moment for moment in moments if moment is not None), default=None)
        return None if first is None else max(first, self.postponed_until_ms)


class Wants:
    def __init__(self) -> None:
        self._wants: OrderedDict[str, Want] = OrderedDict()  # those that were asked for last are at the end
        self._idle: OrderedDict[str, None] = OrderedDict()  # those that have been idle for longest come first
        self._heap: list[tuple[int, int, Want]] = []
        self._tickets = 0
        self.waiting: dict[str, Want] = {}  # those that somebody waits for
        self.central: dict[str, Want] = {}  # those that are asked for request by request

    def __len__(self) -> int:
        return len(self._wants)

    def __iter__(self) -> Iterator[Want]:
        return iter(self._wants.values())

    def find(self, quota: str) -> Want | None:
        return self._wants.get(quota)

    @property
    def is_full(self) -> bool:
        return len(self._wants) >= MOST_FOLLOWED and not self._idle

    def follow(self, want: Want) -> None:
        """Keep a new want. Forget an idle one for it, if there are many."""
        if len(self._wants) >= MOST_KEPT and self._idle:
            self._forget(next(iter(self._idle)))
        want.is_followed = True
        self._wants[want.quota] = want
        self.changed(want)

    def _forget(self, quota: str) -> None:
        want = self._wants.pop(quota)
        want.is_followed, want.ticket = False, 0
        self._idle.pop(quota, None)
        self.central.pop(quota, None)

    def touch(self, want: Want) -> None:
        if want.is_followed:
            self._wants.move_to_end(want.quota)

    def recent(self) -> Iterator[Want]:
        return islice(reversed(self._wants.values()), MOST_RECENT)

    def changed(self, want: Want) -> None:
        """Enter what was changed in a want: when it is due, whether it is idle, and whether somebody waits."""
        if not want.is_followed:
            return
        self._enter(self.waiting, want, is_member=want.waiting > 0)
        self._enter(self.central, want, is_member=want.asking is not None)
        if not want.idle:
            self._idle.pop(want.quota, None)
        elif want.quota not in self._idle:
            self._idle[want.quota] = None
        due_ms = want.due_at_ms
        if due_ms != want.scheduled_ms or (due_ms is not None and not want.ticket):
            self._schedule(want, due_ms)

    @staticmethod
    def _enter(members: dict[str, Want], want: Want, *, is_member: bool) -> None:
        if is_member:
            members[want.quota] = want
        else:
            members.pop(want.quota, None)

    # --- the heap -----------------------------------------------------------------------------------------------------

    def _schedule(self, want: Want, due_ms: int | None) -> None:
        """An entry whose ticket is not its want's is out of date, and is passed over when its moment comes."""
        want.scheduled_ms, want.ticket = due_ms, 0
        if due_ms is None:
            return
        self._tickets += 1
        want.ticket = self._tickets
        if len(self._heap) > 2 * len(self._wants) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
            heapify(self._heap)
        heappush(self._heap, (due_ms, want.ticket, want))

    def due(self, now_ms: int, most: int) -> list[Want]:
        """Return wants that are due. They stay due until they are changed, behind those of the same moment."""
        found: list[Want] = []
        while self._heap and self._heap[0][0] <= now_ms and len(found) < most:
            _, ticket, want = heappop(self._heap)
            if ticket == want.ticket:
                found.append(want)
        for want in found:
            self._schedule(want, want.scheduled_ms)
        return found

    def first_due_ms(self) -> int | None:
        while self._heap and self._heap[0][1] != self._heap[0][2].ticket:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
