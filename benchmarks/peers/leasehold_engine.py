"""Leasehold in the process of whoever asks, asked like the libraries of others: `leasehold_engine ROUTE`."""

import asyncio
import sys

import uvloop

from benchmarks.peers.closed_loop import measure
from leasehold.engine import Engine


async def main(route: str) -> None:
    engine = Engine()
    subject = {"tenant": "acme", "route": route, "method": "GET"}

    async def ask() -> bool:
        return (await engine.check(subject)).allowed

    async with engine.running():
        await measure(ask)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1]))
