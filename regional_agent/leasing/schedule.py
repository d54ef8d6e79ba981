"""The quotas that an agent follows, by when each is due for an exchange. No operation looks at all of them.

A heap has the times at which quotas are due. A quota of which nothing is requested, held or leased is *idle*: when
there are too many, the one that has been idle for longest is forgotten. If none is idle, a new quota is not followed,
and no lease is requested for it.
"""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import islice

from regional_agent.leasing.quota import Quota

MOST_KEPT = 10_000  # beyond these, idle ones are forgotten
MOST_FOLLOWED = 50_000
MOST_RECENT = 2_000  # among which the hottest are looked for: the highest demand was recorded lately
SPARE_ENTRIES = 1_000  # outdated entries of the heap, beyond twice the quotas


class QuotaSchedule:
    def __init__(self) -> None:
        self._quotas: OrderedDict[str, Quota] = OrderedDict()  # the latest demand comes last
        self._idle: OrderedDict[str, None] = OrderedDict()  # the longest idle comes first
        self._heap: list[tuple[int, int, Quota]] = []
        self._tickets = 0
        self.waiting: dict[str, Quota] = {}  # requests wait for these
        self.central: dict[str, Quota] = {}  # requests ask for these one by one

    def __len__(self) -> int:
        return len(self._quotas)

    def __iter__(self) -> Iterator[Quota]:
        return iter(self._quotas.values())

    def find(self, name: str) -> Quota | None:
        return self._quotas.get(name)

    @property
    def is_full(self) -> bool:
        return len(self._quotas) >= MOST_FOLLOWED and not self._idle

    def follow(self, quota: Quota) -> None:
        """Follow a new quota. Forget an idle one for it, if there are many."""
        if len(self._quotas) >= MOST_KEPT and self._idle:
            self._forget(next(iter(self._idle)))
        quota.is_followed = True
        self._quotas[quota.name] = quota
        self.update(quota)

    def replace(self, before: Quota, quota: Quota) -> None:
        """Follow a quota in another mode."""
        if before.is_followed:
            before.is_followed, before.ticket = False, 0
            quota.is_followed = True
            self._quotas[quota.name] = quota

    def _forget(self, name: str) -> None:
        quota = self._quotas.pop(name)
        quota.is_followed, quota.ticket = False, 0
        self._idle.pop(name, None)
        self.central.pop(name, None)

    def touch(self, quota: Quota) -> None:
        if quota.is_followed:
            self._quotas.move_to_end(quota.name)

    def recent(self) -> Iterator[Quota]:
        return islice(reversed(self._quotas.values()), MOST_RECENT)

    def update(self, quota: Quota) -> None:
        """Enter what changed in a quota: when it is due, whether it is idle, and whether requests wait."""
        if not quota.is_followed:
            return
        self._enter(self.waiting, quota, is_member=quota.waiting > 0)
        self._enter(self.central, quota, is_member=quota.is_central)
        if not quota.is_idle:
            self._idle.pop(quota.name, None)
        elif quota.name not in self._idle:
            self._idle[quota.name] = None
        due_ms = quota.due_at_ms
        if due_ms != quota.scheduled_ms or (due_ms is not None and not quota.ticket):
            self._schedule(quota, due_ms)

    @staticmethod
    def _enter(members: dict[str, Quota], quota: Quota, *, is_member: bool) -> None:
        if is_member:
            members[quota.name] = quota
        else:
            members.pop(quota.name, None)

    # --- the heap -----------------------------------------------------------------------------------------------------

    def _schedule(self, quota: Quota, due_ms: int | None) -> None:
        """Enter a quota. An entry whose ticket is not its quota's is out of date, and is skipped when it is due."""
        quota.scheduled_ms, quota.ticket = due_ms, 0
        if due_ms is None:
            return
        self._tickets += 1
        quota.ticket = self._tickets
        if len(self._heap) > 2 * len(self._quotas) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
            heapify(self._heap)
        heappush(self._heap, (due_ms, quota.ticket, quota))

    def due(self, now_ms: int, most: int) -> list[Quota]:
        """Return quotas that are due. They stay due until they are updated, behind those of the same time."""
        found: list[Quota] = []
        while self._heap and self._heap[0][0] <= now_ms and len(found) < most:
            _, ticket, quota = heappop(self._heap)
            if ticket == quota.ticket:
                found.append(quota)
        for quota in found:
            self._schedule(quota, quota.scheduled_ms)
        return found

    def first_due_ms(self) -> int | None:
        while self._heap and self._heap[0][1] != self._heap[0][2].ticket:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
