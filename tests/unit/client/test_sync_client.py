"""The generated client for threads is up to date, and the generator translates what the source uses."""

import leasehold
from leasehold.client._sync import client
from tools.sync_client import TARGET, generated, to_sync


def test_the_generated_files_are_up_to_date() -> None:
    assert {path: path.read_text() for path in TARGET.glob("*.py")} == generated(), "run ./dev sync-client"


def test_async_words_are_dropped_and_names_translated() -> None:
    source = (
        "async def f(self, g: Callable[[int], Awaitable[dict[str, int]]]) -> 'AsyncPool':\n"
        "    async with self.lock, AsyncPool() as pool:\n"
        "        return await (await g(1)).asynchronous  # awaits AsyncPool\n"
    )
    assert to_sync(source).splitlines() == [
        "def f(self, g: Callable[[int], dict[str, int]]) -> 'Pool':",
        "    with self.lock, Pool() as pool:",
        "        return (g(1)).asynchronous  # awaits AsyncPool",
    ]


def test_the_generated_client_is_the_one_that_is_exported() -> None:
    assert leasehold.Client is client.Client
