"""Items that the coordinator refused as they are: left out of later messages, and shown to people.

The same item would be refused each time. A change of the limits or of the coordinator may make it acceptable, so each
is forgotten after a while.
"""

from collections import OrderedDict
from typing import NamedTuple

SET_ASIDE_MS = 600_000
MOST_ITEMS = 1_000  # beyond these the oldest is forgotten, and sent again


class RefusedItem(NamedTuple):
    name: str
    reason: str
    until_ms: int


class SetAside:
    def __init__(self) -> None:
        self._items: OrderedDict[str, RefusedItem] = OrderedDict()

    def add(self, name: str, reason: str, now_ms: int, for_ms: int = SET_ASIDE_MS) -> None:
        self._items[name] = RefusedItem(name, reason, now_ms + for_ms)
        self._items.move_to_end(name)
        if len(self._items) > MOST_ITEMS:
            self._items.popitem(last=False)

    def has(self, name: str, now_ms: int) -> bool:
        item = self._items.get(name)
        if item is not None and now_ms >= item.until_ms:
            del self._items[name]
            return False
        return item is not None

    def until_ms(self, name: str) -> int:
        item = self._items.get(name)
        return 0 if item is None else item.until_ms

    def items(self, now_ms: int) -> list[RefusedItem]:
        return [item for item in self._items.values() if now_ms < item.until_ms]

    def __bool__(self) -> bool:
        return bool(self._items)
