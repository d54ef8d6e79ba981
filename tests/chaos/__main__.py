"""`./dev chaos --minutes N` kills running processes, again and again, and prints the balance sheet."""

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chaos.balance import settled_balance, sheet
from tests.chaos.killing import KINDS, kill
from tests.chaos.load import Load
from tests.chaos.pieces import Stack


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long the load runs (default: 1)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with TemporaryDirectory() as directory:
        stack = Stack(Path(directory))
        try:
            stack.begin()
            return asyncio.run(chaos(stack, options.seed, options.minutes * 60))
        finally:
            stack.end()


async def chaos(stack: Stack, seed: int, seconds: float) -> int:
    load, chance, kills = Load(stack.agents, seed), random.Random(seed), list[str]()
    running = asyncio.create_task(load.run())
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        await asyncio.sleep(chance.uniform(0.2, 2.0))
        kind = chance.choice(KINDS)
        kills.append(await asyncio.to_thread(kill, stack, kind))
        print(kills[-1], flush=True)
    load.stop()
    await running
    lines = await asyncio.to_thread(settled_balance, stack, load.journal)
    faults = [fault for line in lines for fault in line.faults()]
    print(sheet(lines, load.journal, [f"\n{len(kills)} kills:", *kills]))
    print("\n".join(faults) or "the books agree with the journal")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
