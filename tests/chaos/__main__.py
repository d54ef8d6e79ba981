"""`./dev chaos --minutes N` kills running processes, again and again, and prints the balance sheet.

`./dev chaos --network` makes each fault of networks, databases, stores, disks and memory once, and writes the table of
docs/explanation/faults.md.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chaos.balance import settled_balance, sheet
from tests.chaos.killing import KINDS, kill
from tests.chaos.load import Load
from tests.chaos.network import table
from tests.chaos.network.alerts import Alerts, watching
from tests.chaos.network.faults import FAULTS
from tests.chaos.network.memory import kind_of_bound
from tests.chaos.network.stack import DividedStack, Equipment, running
from tests.chaos.network.trial import try_out
from tests.chaos.pieces import Stack

NAMES = tuple(fault.name for fault in FAULTS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long the load runs (default: 1)")
    parser.add_argument("--network", action="store_true", help="make real faults one by one, and write their table")
    parser.add_argument("--only", choices=NAMES, action="append", help="this network fault")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long a network fault lasts (default: 10)")
    parser.add_argument("--relays", action="store_true", help="join places by relays, as without rights for namespaces")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    if options.network or options.only:
        return network(options)
    with TemporaryDirectory() as directory:
        stack = Stack(Path(directory))
        try:
            stack.begin()
            return asyncio.run(chaos(stack, options.seed, options.minutes * 60))
        finally:
            stack.end()


def network(options: argparse.Namespace) -> int:
    """Make faults on the stacks that they need, and publish the table if all were made."""
    records, contradictions = [], 0
    kind = ""
    for equipment in dict.fromkeys(fault.equipment for fault in FAULTS):
        chosen = [fault for fault in FAULTS if fault.equipment == equipment and fault.name in (options.only or NAMES)]
        if not chosen:
            continue
        with on_stack(equipment, options) as (stack, alerts):
            kind = stack.wan.kind
            for fault in chosen:
                record = try_out(stack, alerts, fault, options.seconds, options.seed)
                records.append(record)
                print("\n".join([table.row(record), *record.faults()]), flush=True)
                contradictions += len(record.faults())
    kind = f"{kind}, and memory was bounded by {kind_of_bound()}"
    print(f"The places were {kind}.")
    if options.only is None and not options.relays and not contradictions:
        table.publish(records, kind)
    return 1 if contradictions else 0


@contextmanager
def on_stack(equipment: Equipment, options: argparse.Namespace) -> Iterator[tuple[DividedStack, Alerts]]:
    with (
        TemporaryDirectory() as directory,
        running(equipment, options.seed, by_relays=options.relays) as stack,
        watching(stack, Path(directory, "prometheus")) as alerts,
    ):
        yield stack, alerts


async def chaos(stack: Stack, seed: int, seconds: float) -> int:
    load, chance, kills = Load(stack.agents_of, seed), random.Random(seed), list[str]()
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
