"""Deliver signals to regions. Signals are hints: what a region misses comes with its next exchange.

A transaction that frees units, recalls some or changes a policy notifies, and Postgres delivers the notice to every
coordinator when it commits. The hub hands it to the event streams and long polls that it concerns. Queues are bounded:
a slow reader loses the oldest signals.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from coordinator.notice import Notice
from protocol.messages import Signal

MAX_WAITING_SIGNALS = 256


class SignalSubscription:
    """The queue of one reader."""

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
        """Return what is queued, or an empty list after the time-out, or None when the hub has closed."""
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
        self._subscriptions: set[SignalSubscription] = set()
        self._closed = False

    @contextmanager
    def subscribe(self, region: str) -> Iterator[SignalSubscription]:
        subscription = SignalSubscription(region)
        if self._closed:
            subscription.close()
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def deliver(self, payload: str) -> None:
        """Queue a notice for its readers. `payload`: as Postgres delivers it."""
        notice = msgspec.json.decode(payload, type=Notice)
        for subscription in self._subscriptions:
            if notice.region in (None, subscription.region):
                subscription.put(notice.signal)

    def close(self) -> None:
        """End every stream and long poll, also those that begin later."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription.close()

    def __len__(self) -> int:
        return len(self._subscriptions)
