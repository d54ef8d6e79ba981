"""Resets of rates: what people reset is forgotten in the store, once, and in what this agent remembers of it.

Each agent of a region gets each reset, and the store does it once. An agent that was away, or whose store was, does it
when both are there. Another incarnation of the store may have forgotten a reset, so it is told the latest ones again.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice

import structlog

from protocol.messages import ResetKeys
from regional_agent.leasing.epoch import EpochManager
from regional_agent.metrics import AgentMetrics
from regional_agent.store.connection import StoreError, StoreUnavailable
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import Fenced, StoreIncarnation

log = structlog.get_logger()

MOST_KNOWN = 10_000
MOST_IN_CALL = 100
RETRY_S = 0.2


class Resets:
    """The resets of one cell."""

    def __init__(
        self,
        scripts: Scripts,
        epochs: EpochManager,
        metrics: AgentMetrics,
        return_units: Callable[[str], None],
        forget: Callable[[str], None],
    ) -> None:
        """`return_units`: of a key, to the store. `forget`: what this agent remembers of a key."""
        self._scripts = scripts
        self._epochs = epochs
        self._metrics = metrics
        self._return_units = return_units
        self._forget = forget
        self._known: deque[ResetKeys] = deque(maxlen=MOST_KNOWN)
        self._pending: deque[ResetKeys] = deque()
        self._valid_in: StoreIncarnation | None = None
        self._changed = asyncio.Event()

    def add(self, resets: Iterable[ResetKeys]) -> None:
        """Take resets in the order of their numbers."""
        new = list(resets)
        self._known.extend(new)
        self._pending.extend(new)
        self._changed.set()

    async def run(self) -> None:
        while True:
            await self._apply()
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._changed.wait()
            self._changed.clear()

    async def _apply(self) -> None:
        incarnation = self._epochs.current
        if incarnation is None:
            return
        if incarnation is not self._valid_in:
            self._pending, self._valid_in = deque(self._known), incarnation
        try:
            while self._pending:
                await self._apply_some(incarnation, list(islice(self._pending, MOST_IN_CALL)))
        except Fenced:
            self._epochs.invalidate()
        except (StoreUnavailable, StoreError) as error:
            log.warning("reset failed", pending=len(self._pending), reason=str(error))

    async def _apply_some(self, incarnation: StoreIncarnation, resets: list[ResetKeys]) -> None:
        for key in (key for each in resets for key in each.keys):
            self._return_units(key)  # what lies here would be beyond the limit of a key that has everything again
        self._metrics.resets.inc(await self._scripts.reset_rates(incarnation, resets))
        for each in resets:
            for key in each.keys:
                self._forget(key)
            self._pending.popleft()
