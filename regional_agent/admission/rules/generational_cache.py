"""What was worked out once and need not be again: the answers of a pure question, and never more than so many.

Two generations. An answer that is used lives in the younger one; when that is full, it becomes the older, and what was
there is forgotten. So what is asked often stays, what is asked once goes, and a hit costs one look into a dict: moving
an entry to the end of a list, as a textbook's cache does at each hit, would cost three times as much.
"""

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """At least the `most` answers used last, and at most twice as many."""

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
