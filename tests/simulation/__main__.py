"""./dev simulate: many seeds, or one; all mutants; what was reached and what was not."""

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.simulation.checks.coverage import CELLS, OUTCOMES, unreached
from tests.simulation.faults import draw
from tests.simulation.mutants import DRAWN_FROM, MUTANTS, WITHOUT_A_GUARD
from tests.simulation.run import Result, Violation, run, shrink

CHUNK = 10
SEEDS_FOR_A_MUTANT = 300
PROGRESS_S = 10.0


def main() -> int:
    options = _options()
    return _mutants(options) if options.mutants or options.mutant else _simulate(options)


@dataclass
class Sum:
    """The totals of all runs."""

    started_s: float = field(default_factory=time.monotonic)
    seeds: int = 0
    steps: int = 0
    admitted: int = 0
    booked: int = 0
    suspense: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.steps += result.steps
        self.admitted += result.admitted
        self.booked += result.booked
        self.suspense += result.suspense
        self.reached += result.reached
        self.faults += result.faults
        if result.violation:
            self.violations.append(result.violation)

    def __str__(self) -> str:
        elapsed_s = time.monotonic() - self.started_s
        units = f"{self.admitted} units admitted, {self.booked} booked, {self.suspense} in suspense"
        return (
            f"{self.seeds} seeds, {self.steps} steps, {units}, {elapsed_s:.0f} s, {self.steps / elapsed_s:.0f} steps/s"
        )


def _simulate(options: argparse.Namespace) -> int:
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    total, told_s = Sum(), time.monotonic()
    for result in _results(list(seeds), options.steps, options.jobs):
        total.add(result)
        if result.violation:
            _show(result.violation, options.steps, shortened=len(total.violations) <= options.shorten)
        if time.monotonic() - told_s > PROGRESS_S:
            told_s = time.monotonic()
            print(f"{total}, {len(total.violations)} violations so far", flush=True)
    _show_sum(total)
    return 1 if total.violations else 0


def _show_sum(total: Sum) -> None:
    print(f"\n{total}")
    print("faults: " + ", ".join(f"{kind} {number}" for kind, number in sorted(total.faults.items())))
    for what, missing in unreached(total.reached).items():
        print(f"{what} not reached: {', '.join(missing) or 'none'}")
    outcomes, cells = (sum(bool(total.reached[name]) for name in names) for names in (OUTCOMES, CELLS))
    print(f"{outcomes} of {len(OUTCOMES)} outcomes and {cells} of {len(CELLS)} reachable cells visited")
    wrong = [f"{each.seed} ({each.invariant})" for each in total.violations]
    print(f"{len(wrong)} violations, in seeds {', '.join(wrong)}" if wrong else "no violation")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds (200)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--seed", type=int, help="only this one: replay it")
    parser.add_argument("--steps", type=int, default=150, help="steps before everything is healed (150)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--shorten", type=int, default=3, help="find the shortest history of so many violations (3)")
    parser.add_argument("--mutants", action="store_true", help="remove each guard, and see that it is missed")
    parser.add_argument("--mutant", help="only this one")
    return parser.parse_args()


def _chunk(task: tuple[list[int], int]) -> list[Result]:
    seeds, steps = task
    return [run(seed, steps) for seed in seeds]


def _results(seeds: list[int], steps: int, jobs: int) -> Iterator[Result]:
    """Return the results in the order of the seeds."""
    if len(seeds) == 1:
        yield run(seeds[0], steps)
        return
    tasks = [(seeds[at : at + CHUNK], steps) for at in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(jobs, initializer=_start_lean) as pool:
        for results in pool.map(_chunk, tasks):
            yield from results


def _start_lean() -> None:
    """Freeze what is imported, so that the garbage collector skips it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _show(violation: Violation, steps: int, shortened: bool) -> None:
    print(f"\nseed {violation.seed}, step {violation.step}: {violation.invariant}\n  {violation.what}")
    if shortened:
        print("the shortest history that was found to lead there:")
        for event in shrink(violation.seed, steps, violation):
            print(f"  {event}")
    print(f"replay it: ./dev simulate --seed {violation.seed} --steps {steps}\n", flush=True)


def _mutant(task: tuple[str, int, int]) -> tuple[str, Violation | None, int, int]:
    name, seeds, steps = task
    done = 0
    for seed in range(seeds):
        result = run(seed, steps, draw(seed, steps, DRAWN_FROM.get(name, ())), MUTANTS[name])
        done += result.steps
        if result.violation:
            return name, result.violation, seed + 1, done
    return name, None, seeds, done


def _mutants(options: argparse.Namespace) -> int:
    names = [options.mutant] if options.mutant else list(MUTANTS)
    survived = 0
    with ProcessPoolExecutor(options.jobs, initializer=_start_lean) as pool:
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
