"""./dev simulate: many seeds, or one; all mutants; what was reached and what was not."""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from protocol.lease import LeaseEvent, LeaseState
from protocol.outcomes import EpochRefusal, ExchangeOutcome, GrantRefusal
from tests.simulation.mutants import MUTANTS, WITHOUT_A_GUARD
from tests.simulation.run import Result, Violation, run, shrink

CHUNK = 5
SEEDS_FOR_A_MUTANT = 300


def main() -> int:
    options = _options()
    if options.mutants:
        return _mutants(options)
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    started, found, reached, steps, units = time.monotonic(), list[Violation](), Counter[str](), 0, 0
    for result in _results(list(seeds), options.steps, options.jobs):
        reached += result.reached
        steps, units = steps + result.steps, units + result.admitted
        if result.violation:
            found.append(result.violation)
            _show(result.violation, options.steps)
            if len(found) == options.stop_after:
                break
    elapsed_s = time.monotonic() - started
    print(f"{len(seeds)} seeds, {steps} steps, {units} units admitted, {steps / elapsed_s:.0f} steps/s")
    _show_coverage(reached)
    print("no violation" if not found else f"{len(found)} violations")
    return 1 if found else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds (200)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--seed", type=int, help="only this one: replay it")
    parser.add_argument("--steps", type=int, default=150, help="steps before everything is healed (150)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--stop-after", type=int, default=3, help="so many violations (3)")
    parser.add_argument("--mutants", action="store_true", help="remove each guard, and see that it is missed")
    parser.add_argument("--mutant", help="only this one")
    return parser.parse_args()


def _chunk(task: tuple[list[int], int]) -> list[Result]:
    seeds, steps = task
    return [run(seed, steps) for seed in seeds]


def _results(seeds: list[int], steps: int, jobs: int) -> Iterator[Result]:
    if len(seeds) == 1:
        yield run(seeds[0], steps)
        return
    tasks = [(seeds[at : at + CHUNK], steps) for at in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(jobs) as pool:
        for results in pool.map(_chunk, tasks):
            yield from results


def _show(violation: Violation, steps: int) -> None:
    print(f"\nseed {violation.seed}, step {violation.step}: {violation.invariant}\n  {violation.what}")
    print("the shortest history that was found to lead there:")
    for event in shrink(violation.seed, steps, violation):
        print(f"  {event}")
    print(f"replay it: ./dev simulate --seed {violation.seed} --steps {steps}\n", flush=True)


def unreached(reached: Counter[str]) -> dict[str, list[str]]:
    """Refusals that nobody met, and cells of the transition table that nothing asked for."""
    outcomes = [
        f"{kind.__name__}.{each.name}" for kind in (ExchangeOutcome, GrantRefusal, EpochRefusal) for each in kind
    ]
    cells = [f"{state.name} / {event.name}" for state in LeaseState for event in LeaseEvent]
    return {
        "outcomes": [name for name in outcomes if not reached[name]],
        "cells": [name for name in cells if not reached[name]],
    }


def _show_coverage(reached: Counter[str]) -> None:
    for what, names in unreached(reached).items():
        print(f"{what} not reached: {', '.join(names) or 'none'}")


def _mutant(task: tuple[str, int, int]) -> tuple[str, Violation | None, int, int]:
    name, seeds, steps = task
    done = 0
    for seed in range(seeds):
        result = run(seed, steps, mutant=MUTANTS[name])
        done += result.steps
        if result.violation:
            return name, result.violation, seed + 1, done
    return name, None, seeds, done


def _mutants(options: argparse.Namespace) -> int:
    names = [options.mutant] if options.mutant else list(MUTANTS)
    survived = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        tasks = [(name, SEEDS_FOR_A_MUTANT, options.steps) for name in names]
        for name, violation, seeds, steps in pool.map(_mutant, tasks):
            survived += violation is None
            caught = f"caught by {violation.invariant}" if violation else "SURVIVED"
            print(f"{name:42} {caught:38} after {seeds:4} seeds, {steps:6} steps", flush=True)
    for name, reason in WITHOUT_A_GUARD.items():
        print(f"{name:42} not tried: {reason}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
