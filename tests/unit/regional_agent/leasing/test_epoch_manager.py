"""An agent follows the incarnation of its store, even if that changes during a look-up."""

import asyncio

import pytest

from protocol.messages import EpochOpened, OpenEpoch, RebindEpoch
from regional_agent.leasing.epoch import EpochManager
from regional_agent.store.scripts import Scripts
from tests.simulation.simulated.scripted_store import LocalConnection, ScriptedStore

pytestmark = pytest.mark.anyio


class Coordinator:
    """The store restarts while it is called for the first time."""

    def __init__(self, store: LocalConnection) -> None:
        self._store = store
        self.opened = 0

    async def open_epoch(self, _: OpenEpoch) -> EpochOpened:
        self.opened += 1
        if self.opened == 1:
            self._store.store.restart("run-2", "replid-2")
            self._store.lose()
            await self._store.connect()
        return EpochOpened(epoch=6 + self.opened, lanes=2)

    async def rebind_epoch(self, epoch: int, request: RebindEpoch) -> EpochOpened:
        raise AssertionError(f"no store here is exempt: {epoch}, {request}")


async def test_a_look_up_of_an_incarnation_that_has_ended_is_discarded() -> None:
    """The data may be lost with it, so admitting by the older incarnation's fence could admit the same units again."""
    believed: list[bool] = []

    def invalidate() -> None:
        keeper.invalidate()

    def note() -> None:
        assert keeper.current is not None
        believed.append(keeper.current.fingerprint == store.fingerprint)

    store = LocalConnection(ScriptedStore(), on_connected=invalidate)
    keeper = EpochManager(store, Scripts(store), Coordinator(store), on_established=note)  # type: ignore[arg-type]
    await store.connect()
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        while keeper.current is None:
            await keeper.established.wait()
    running.cancel()
    assert (believed, keeper.current.epoch) == ([True], 8)
