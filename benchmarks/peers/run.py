"""Leasehold beside the servers and libraries that people use for the same purpose: `./dev bench peers`.

Everything runs on one machine in one run, turn by turn: a server and its store on one core, and the load on the other.
All stores are the same binary with the same configuration, and no limit is ever reached. A hot key is one key for all
requests of a turn; random keys are drawn from 100,000.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.frame import FEWEST_TURNS, Case, Lines, Load, Turn, compare, figure
from benchmarks.peers.generator import (
    EVERY_KEY_ONCE,
    KEYS,
    OPEN_LOOP_CALLERS,
    RANDOM,
    Generated,
    Generator,
    Keys,
    hot_key,
)
from benchmarks.peers.in_process import libraries, services, waiting
from benchmarks.peers.installing import Installed, install
from benchmarks.peers.processor_time import used_us
from benchmarks.peers.servers import (
    FIXED_WINDOW,
    Target,
    leasehold_check,
    leasehold_limits,
    leasehold_targets,
    peers,
    running,
)
from benchmarks.stack import Stack, local_stack, pinned, put_limits

SECTIONS = ("servers", "open-loop", "libraries", "services")
KINDS_OF_KEYS = ("hot", "random")
OPEN_LOOP = "open loop, random keys, {part} in ms by requests a second"
OFFERED_PER_SECOND = (2_000, 5_000, 10_000, 15_000, 20_000, 25_000, 30_000)
WALK_S = 20.0  # at most
NOT_MEASURED = "not measured"
HOT_KEY, RANDOM_KEYS = "one hot key", "random keys"


class Choice(NamedTuple):
    """The parts of the comparison to run."""

    sections: frozenset[str]
    keys: frozenset[str]

    def has(self, section: str, kind_of_keys: str) -> bool:
        return section in self.sections and kind_of_keys in self.keys

    @property
    def is_everything(self) -> bool:
        return len(self.sections) == len(SECTIONS) and len(self.keys) == len(KINDS_OF_KEYS)


def parse_choice(only: str) -> Choice:
    """Parse a list such as `servers,random`: sections and kinds of keys, all of a sort of which it names none."""
    names = frozenset(filter(None, only.split(",")))
    if unknown := names - {*SECTIONS, *KINDS_OF_KEYS}:
        known = ", ".join((*SECTIONS, *KINDS_OF_KEYS))
        raise SystemExit(f"--only: peers has no part {sorted(unknown)[0]!r}; its parts are: {known}")
    return Choice(names & set(SECTIONS) or frozenset(SECTIONS), names & set(KINDS_OF_KEYS) or frozenset(KINDS_OF_KEYS))


class Subject(NamedTuple):
    """A limiter that is measured in turns, with the processes whose time is counted."""

    name: str
    run: Callable[[Keys, float], Awaitable[Generated]]
    pid: int
    store_pid: int | None
    only_hot: bool


async def run(repeats: int, seconds: float, port: int, only: str = "") -> dict[str, Lines]:
    choice = parse_choice(only)
    installed = install()
    program = installed.program("loadgen")
    if program is None:
        raise SystemExit("the load generator needs Go")
    tables: dict[str, Lines] = {}
    async with local_stack(port) as stack:
        await put_limits(stack, leasehold_limits(), leasehold_check(FIXED_WINDOW))
        with pinned(stack) as measure, TemporaryDirectory() as scratch:
            generator = Generator(program)
            bench = _Bench(stack, installed, generator, choice, repeats, seconds, port, measure, Path(scratch))
            if choice.sections & {"servers", "open-loop"}:
                tables |= await bench.measure_servers()
            if "libraries" in choice.sections:
                tables |= await bench.measure_libraries()
            if "services" in choice.sections:
                tables |= await bench.measure_services()
    if installed.missing:
        tables[NOT_MEASURED] = [Case(name, {"why": reason}) for name, reason in installed.missing.items()]
    return tables


async def _turn(subject: Subject, keys: Iterator[Keys], seconds: float) -> Load:
    before_us, store_before_us = used_us(subject.pid), used_us(subject.store_pid)
    done = await subject.run(next(keys), seconds)
    return done.load._replace(
        cpu_us=(used_us(subject.pid) - before_us) / done.decisions,
        store_cpu_us=(used_us(subject.store_pid) - store_before_us) / done.decisions,
    )


@dataclass(frozen=True)
class _Bench:
    stack: Stack
    installed: Installed
    generator: Generator
    choice: Choice
    repeats: int
    seconds: float
    port: int
    measure: Callable[[int], None]  # puts a process on the measured core
    scratch: Path

    @property
    def fewest(self) -> int:
        return FEWEST_TURNS if self.choice.is_everything else 1

    async def measure_servers(self) -> dict[str, Lines]:
        tables: dict[str, Lines] = {}
        every = list(peers(self.installed, self.port + 200, self.scratch))
        async with running(every, self.generator, self.measure, self.scratch, self.installed.missing) as others:
            targets = [*leasehold_targets(self.stack), *others]
            if "servers" in self.choice.sections:
                tables |= await self._compare("servers", [self._subject(each) for each in targets], walk_s=WALK_S)
            if self.choice.has("open-loop", "random"):
                tables |= await self._open_loop([each for each in targets if not each.only_hot])
        return tables

    async def measure_libraries(self) -> dict[str, Lines]:
        every = list(libraries(self.installed, self.stack, self.port + 230))
        async with waiting(every, self.stack, self.measure, self.scratch) as callers:
            subjects = [
                Subject(each.library.name, each.run, each.process.pid, each.store_pid, each.library.only_hot)
                for each in callers
            ]
            return await self._compare("libraries in one process", subjects, part=1 / 2)

    async def measure_services(self) -> dict[str, Lines]:
        every = list(services(self.installed, self.stack, self.port + 250))
        async with running(every, self.generator, self.measure, self.scratch, self.installed.missing) as targets:
            subjects = [self._subject(each) for each in targets]
            return await self._compare("a FastAPI service that is limited", subjects, part=1 / 2)

    def _subject(self, target: Target) -> Subject:
        run = partial(self.generator.run, target.address, target.request)
        return Subject(target.name, run, target.pid, target.store_pid, target.only_hot)

    async def _compare(
        self, section: str, subjects: Sequence[Subject], part: float = 1, walk_s: float = 0
    ) -> dict[str, Lines]:
        """Measure one hot key, another in each turn, and then random keys, each of which was used once before."""
        print(f"measuring {section}", flush=True)
        seconds = self.seconds * part
        tables: dict[str, Lines] = {}
        if "hot" in self.choice.keys:
            keys = map(hot_key, count(KEYS))
            hot: dict[str, Turn] = {each.name: partial(_turn, each, keys, seconds) for each in subjects}
            tables[f"{section}, {HOT_KEY}"] = await compare(hot, self.repeats, self.fewest)
        if "random" in self.choice.keys:
            many = [each for each in subjects if not each.only_hot]
            for each in many if walk_s else ():
                await each.run(EVERY_KEY_ONCE, walk_s)
            random: dict[str, Turn] = {each.name: partial(_turn, each, repeat(RANDOM), seconds) for each in many}
            tables[f"{section}, {RANDOM_KEYS}"] = await compare(random, self.repeats, self.fewest)
        return tables

    async def _open_loop(self, targets: Sequence[Target]) -> dict[str, Lines]:
        """Offer fixed rates of requests; a latency counts from when the request was due."""
        print("measuring servers in an open loop", flush=True)
        p50_ms: _Samples = {each.name: {} for each in targets}
        p99_ms: _Samples = {each.name: {} for each in targets}
        for _ in range(max(self.repeats, self.fewest)):
            for rate in OFFERED_PER_SECOND:
                for each in targets:
                    done = await self.generator.run(
                        each.address,
                        each.request,
                        RANDOM,
                        self.seconds / 2,
                        per_second=rate,
                        callers=OPEN_LOOP_CALLERS,
                    )
                    p50_ms[each.name].setdefault(rate, []).append(done.load.p50_us / 1_000)
                    p99_ms[each.name].setdefault(rate, []).append(done.load.p99_us / 1_000)
        return {OPEN_LOOP.format(part=part): cases(ms) for part, ms in (("p50", p50_ms), ("p99", p99_ms))}


_Samples = dict[str, dict[int, list[float]]]  # by server and offered rate


def cases(samples: _Samples) -> list[Case]:
    return [
        Case(name, {f"{rate:,}/s": figure(each, digits=2) for rate, each in by_rate.items()})
        for name, by_rate in samples.items()
    ]
