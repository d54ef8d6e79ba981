"""Wait in tests for a condition, and never for a time that ought to be enough.

The bound is far beyond what a busy machine needs. It costs nothing, since a condition that comes ends the wait. Pauses
grow with the time that was waited: a condition may take a request, and many of them would slow down what is awaited.
"""

import asyncio
import inspect
from collections.abc import Callable
from time import monotonic

BOUND_S = 120.0
PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.2
PART_OF_THE_WAIT = 0.1


class attempts:  # noqa: N801 - read as a word of `async for`
    """Iterate at once and then after each pause, until the bound. A loop that comes to its end has waited in vain."""

    def __init__(self) -> None:
        self._began_s: float | None = None

    def __aiter__(self) -> "attempts":
        return self

    async def __anext__(self) -> None:
        if self._began_s is None:
            self._began_s = monotonic()
            return
        waited_s = monotonic() - self._began_s
        if waited_s >= BOUND_S:
            raise StopAsyncIteration
        await asyncio.sleep(min(max(PAUSE_S, PART_OF_THE_WAIT * waited_s), LONGEST_PAUSE_S))


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition. The failure shows the source line that says what was awaited."""
    async for _ in attempts():
        if condition():
            return
    raise AssertionError(f"not within {BOUND_S:g} s: {inspect.getsource(condition).strip()}")
