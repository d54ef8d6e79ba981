"""Probes a store every second, so that a store that hangs is noticed without any request."""

import asyncio

from regional_agent.store.circuit_breaker import StoreCircuitBreaker
from regional_agent.store.connection import Store

WATCH_S = 1.0
AFTER_FAILURE_S = 0.2


class StoreWatch:
    def __init__(self, store: Store, breaker: StoreCircuitBreaker) -> None:
        self._store = store
        self._breaker = breaker

    async def run(self) -> None:
        while True:
            if self._store.connected:
                self._breaker.watch()
            await asyncio.sleep(AFTER_FAILURE_S if self._breaker.is_failing else WATCH_S)
