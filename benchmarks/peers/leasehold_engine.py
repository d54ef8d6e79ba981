"""Leasehold in the process of its caller, measured like the libraries of others: `leasehold_engine ROUTE`."""

import asyncio
import sys

import uvloop

from benchmarks.peers.closed_loop import serve
from leasehold.engine import Engine


async def main(route: str) -> None:
    engine = Engine()

    async def ask(key: str) -> bool:
        return (await engine.check({"tenant": key, "route": route, "method": "GET"})).allowed

    async with engine.running():
        await serve(ask)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1]))
