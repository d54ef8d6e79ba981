"""`./dev bench [NAME…]`: runs the benchmarks, prints their tables, and writes them to `benchmarks/results/`."""

import argparse
import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from functools import partial

import structlog
import uvloop

from benchmarks import agent, booking, central, coordinator, envoy, failures, finance, keys, sizing
from benchmarks.allocation import run as allocation
from benchmarks.allocation import wan
from benchmarks.frame import FEWEST_TURNS, Lines, conditions, publish, show, write
from benchmarks.load import RefusedError
from benchmarks.peers import report
from benchmarks.peers import run as peers
from benchmarks.stack import can_be_pinned

Run = Callable[[int, float, int], Coroutine[None, None, Mapping[str, Lines]]]  # repeats, seconds, port
BENCHMARKS: Mapping[str, Run] = {
    "agent": agent.run,
    "allocation": allocation.run,
    "allocation-wan": wan.run,
    "booking": booking.run,
    "central": central.run,
    "coordinator": coordinator.run,
    "envoy": envoy.run,
    "failures": failures.run,
    "finance": finance.run,
    "keys": keys.run,
    "peers": peers.run,
    "sizing": sizing.run,
}
ONLY_HELP = f"they are printed and not written ({', '.join((*peers.SECTIONS, *peers.KINDS_OF_KEYS))})"
ON_UVLOOP = {"allocation-wan", "coordinator"}  # the load is many connections; what is measured runs in this process
PINNED = {"agent", "envoy", "failures", "peers"}  # to cores of their own, where there are two


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run; all if none ({', '.join(BENCHMARKS)})")
    parser.add_argument("--repeats", type=int, default=FEWEST_TURNS, help=f"turns of each row, at least {FEWEST_TURNS}")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn")
    parser.add_argument("--port", type=int, default=26400, help="the first port of the local stack")
    parser.add_argument("--only", default="", metavar="PARTS", help=f"of `peers`, some parts; {ONLY_HELP}")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(BENCHMARKS):
        parser.error(f"there is no benchmark {sorted(unknown)[0]!r}; there are: {', '.join(BENCHMARKS)}")
    if chosen.only and chosen.names != ["peers"]:
        parser.error("--only chooses parts of `peers`: ./dev bench peers --only PARTS")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    for name in chosen.names or BENCHMARKS:
        how = conditions(datetime.now(UTC)) | {"repeats": max(chosen.repeats, FEWEST_TURNS), "seconds": chosen.seconds}
        how["pinned"] = name in PINNED and can_be_pinned()
        try:
            run = uvloop.run if name in ON_UVLOOP else asyncio.run
            benchmark = partial(peers.run, only=chosen.only) if name == "peers" else BENCHMARKS[name]
            tables = run(benchmark(chosen.repeats, chosen.seconds, chosen.port))
        except RefusedError as error:
            raise SystemExit(f"{name}: {error}") from None
        for about, rows in tables.items():
            show(about, rows)
        if chosen.only:
            continue
        path = write(name, tables, how)
        if name == "peers":
            report.publish()
        publish(name, tables, how)
        print(f"written to {path.relative_to(path.parents[2])}")


main()
