"""Leasehold in the process of whoever asks, asked like the libraries of others."""

import asyncio

import uvloop

from benchmarks.peers.closed_loop import measure
from leasehold.engine import Engine

SUBJECT = {"tenant": "acme", "route": "/benchmark", "method": "GET"}


async def main() -> None:
    engine = Engine()

    async def ask() -> bool:
        return (await engine.check(SUBJECT)).allowed

    async with engine.running():
        await measure(ask)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
