"""Signals on their way to the regions: hints that never carry truth. Whoever misses one hears it in the next exchange.

A transaction that frees units, needs some back or changes a policy notifies, and Postgres delivers the notice to every
coordinator at the moment of the commit. The hub hands it to those of its streams and long polls that it concerns.
Queues are bounded: of a reader that does not keep up, the oldest hints are dropped.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from coordinator.notice import Notice
from protocol.messages import Signal

MAX_WAITING_SIGNALS = 256


class Subscription:
    """One reader's queue."""

    def __init__(self, region: str) -> None:
        self.region = region
        self._waiting: deque[Signal] = deque(maxlen=MAX_WAITING_SIGNALS)
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, signal: Signal) -> None:
        self._waiting.append(signal)
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def take(self, timeout_s: float) -> list[Signal] | None:
        """What waits, after at most so long; an empty list if nothing came, None when the hub has closed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return []
        if self._closed:
            return None
        self._changed.clear()
        taken = list(self._waiting)
        self._waiting.clear()
        return taken


class SignalHub:
    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()
        self._closed = False

    @contextmanager
    def subscribe(self, region: str) -> Iterator[Subscription]:
        subscription = Subscription(region)
        if self._closed:
            subscription.close()
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def deliver(self, payload: str) -> None:
        """A notice as Postgres brings it."""
        notice = msgspec.json.decode(payload, type=Notice)
        for subscription in self._subscriptions:
            if notice.region in (None, subscription.region):
                subscription.put(notice.signal)

    def close(self) -> None:
        """Ends every stream and long poll, and whichever come later."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription.close()

    def __len__(self) -> int:
        return len(self._subscriptions)
