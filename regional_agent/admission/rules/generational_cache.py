"""A bounded cache of the answers of pure functions.

It has two generations. An answer that is used lives in the younger one; when that is full it becomes the older, and
what was there is dropped. So frequent keys stay and rare ones go, and a hit costs one look into a dict. An LRU list,
which moves an entry at each hit, would cost three times as much.
"""

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class GenerationalCache(Generic[K, V]):
    """Keep at least the `most` answers that were used last, and at most twice as many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        if len(self._young) >= self._most:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def forget(self, key: K) -> None:
        self._young.pop(key, None)
        self._old.pop(key, None)

    def clear(self) -> None:
        self._young.clear()
        self._old.clear()

    def __bool__(self) -> bool:
        return bool(self._young or self._old)

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
