"""Wait in tests for a condition, and never for a time that ought to be enough.

The bound is far beyond what a busy machine needs. It costs nothing, since a condition that comes ends the wait.
"""

import asyncio
import inspect
from collections.abc import Callable
from time import monotonic

BOUND_S = 120.0
PAUSE_S = 0.01


class attempts:  # noqa: N801 - read as a word of `async for`
    """Iterate at once and then after each pause, until the bound. A loop that comes to its end has waited in vain."""

    def __init__(self) -> None:
        self._ends_s: float | None = None

    def __aiter__(self) -> "attempts":
        return self

    async def __anext__(self) -> None:
        if self._ends_s is None:
            self._ends_s = monotonic() + BOUND_S
        elif monotonic() >= self._ends_s:
            raise StopAsyncIteration
        else:
            await asyncio.sleep(PAUSE_S)


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition. The failure shows the source line that says what was awaited."""
    async for _ in attempts():
        if condition():
            return
    raise AssertionError(f"not within {BOUND_S:g} s: {inspect.getsource(condition).strip()}")
