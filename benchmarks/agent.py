"""What an agent adds to its store: `POST /v1/check` beside the same script called in the same store by hand.

Both decide on the same bucket, under a limit that is never reached, and the agent decides in the store every time but
where a row says otherwise. What is between them is the agent alone: HTTP, matching of policies, the way to the store.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import httpx
import msgspec

from benchmarks.frame import Fact, Lines, Load, Row, Turn, compare, facts
from benchmarks.load import Server, http_is_whole, load, post, resp, store
from benchmarks.open_loop import open_load, percentile_us
from benchmarks.picture import picture, save
from benchmarks.redis_benchmark import RedisBenchmark, found
from benchmarks.stack import PATIENCE_S, PLANS, REGION, Stack, host_and_port, local_stack, pinned, put_limits
from protocol.identifiers import quota_key
from protocol.limits.document import LimitsDocument, PolicyBundle
from protocol.limits.rates import RateAlgorithm
from regional_agent.admission.policies import Policies
from regional_agent.store.connection import Argument, Reply, StoreConnection
from regional_agent.store.opening import Server as StoreServer
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import RateCharge, StoreIncarnation

PLENTY_PER_SECOND = 1_000_000
SINGLE = "one check in one region, {connections} at once"
BATCHED = "checks in one region, 50 a request, 16 requests at once"
BATCH = 50
BATCHED_CONNECTIONS = 16
CONNECTIONS = (1, 64)
ABUSED_PER_SECOND = 100
OFFERED_PER_SECOND = (500, 1_000, 2_000, 4_000, 6_000, 8_000, 10_000, 12_000, 14_000, 16_000)
PARTS = (0.5, 0.99, 0.999)
KEYS = 20_000
KEY_BYTES = 200.0
NUMBERS_OF_POLICIES = (10, 1_000, 10_000)
MATCHES = 20_000
POLICIES_IN_FORCE = {
    "/benchmark": ["plenty"],
    "/sliced": ["sliced"],
    "/three": ["plenty", "plenty-too", "plenty-three"],
    "/denied": ["exhausted"],
    "/abused": ["abused"],
    **{f"/{algorithm}": [algorithm.value] for algorithm in RateAlgorithm},
}


def limits() -> dict[str, object]:
    plenty = f"{PLENTY_PER_SECOND}/second"
    by_name = {
        **dict.fromkeys(("plenty", "plenty-too", "plenty-three", "sliced"), (plenty, RateAlgorithm.TOKEN_BUCKET)),
        "exhausted": ("1/hour", RateAlgorithm.FIXED_WINDOW),
        "abused": (f"{ABUSED_PER_SECOND}/second", RateAlgorithm.TOKEN_BUCKET),
        **{algorithm.value: ("10/hour", algorithm) for algorithm in RateAlgorithm},
    }
    return {
        "plans": PLANS,
        "quotas": [
            {"name": name, "kind": "rate", "limit": limit, "algorithm": algorithm, "slices": name == "sliced"}
            for name, (limit, algorithm) in by_name.items()
        ],
        "policies": [
            {"name": f"{quota}{route.replace('/', '-')}", "match": {"route": route}, "by": ["tenant"], "quota": quota}
            for route, quotas in POLICIES_IN_FORCE.items()
            for quota in quotas
        ],
    }


def check(route: str, tenant: str = "acme") -> dict[str, object]:
    return {"subject": {"tenant": tenant, "route": route, "method": "GET"}}


async def run(repeats: int, seconds: float, port: int) -> dict[str, Lines]:
    async with local_stack(port) as stack:
        await put_limits(stack, limits(), check("/benchmark"))
        async with the_store(stack["stores"][REGION]) as connection:
            by_hand = await the_same_call(connection)
            with pinned(stack):
                bench = _Bench(stack, connection, by_hand, repeats, seconds)
                tables: dict[str, Lines] = {}
                for connections in CONNECTIONS:
                    tables[SINGLE.format(connections=connections)] = await bench.single(connections)
                tables[BATCHED] = await bench.batched()
                await bench.draw_latencies()
                tables["bytes of a key in the store, beside the goal"] = await bench.memory()
    tables["ns to find a request's policies among so many, by a route not asked for before"] = matching(repeats)
    return tables


class _Bench:
    def __init__(
        self, stack: Stack, connection: "Recorder", by_hand: Sequence[str], repeats: int, seconds: float
    ) -> None:
        self._store_url = stack["stores"][REGION]
        self._store = store(*host_and_port(self._store_url), connection.password)
        self._agent_url = stack["agents"][REGION]
        self._agent = Server(*host_and_port(self._agent_url), http_is_whole)
        self._connection = connection
        self._by_hand = by_hand
        self._repeats = repeats
        self._seconds = seconds

    async def single(self, connections: int) -> list[Row]:
        asked = partial(load, connections=connections, seconds=self._seconds)
        by_hand = partial(asked, self._store, accepted=b"$")
        nothing = partial(asked, self._store, accepted=b":1")
        checked = partial(self._checked, asked)
        abuser = f"of an abuser, limited to {ABUSED_PER_SECOND}/second"
        return await compare(
            self._reference(connections)
            | {
                "FCALL check, by our load generator": partial(by_hand, resp(*self._by_hand)),
                "EVAL of nothing": partial(nothing, resp("EVAL", "return 1", "0")),
                "POST /v1/check": partial(checked, "/benchmark"),
                "of a hot key, by slices": partial(checked, "/sliced"),
                "of three policies": partial(checked, "/three"),
                "denied, and known to be": partial(checked, "/denied", accepted=b"HTTP/1.1 429"),
                abuser: partial(checked, "/abused", accepted=b"HTTP/1.1"),
            },
            self._repeats,
        )

    async def batched(self) -> list[Row]:
        asked = partial(load, connections=BATCHED_CONNECTIONS, seconds=self._seconds)

        async def checks(route: str) -> Load:
            request = post("/v1/check:batch", json.dumps({"checks": [check(route)] * BATCH}).encode())
            return times(await asked(self._agent, request, accepted=b"HTTP/1.1 200"), BATCH)

        turns = self._reference(BATCHED_CONNECTIONS, pipeline=64)
        ours = {"POST /v1/check:batch": "/benchmark", "of a hot key, by slices": "/sliced"}
        counted = {name: partial(self._counted, partial(checks, route)) for name, route in ours.items()}
        return await compare(turns | counted, self._repeats)

    async def draw_latencies(self) -> None:
        """Under load that comes on a schedule, up to more than can be borne."""
        asked = {
            "FCALL by hand": (self._store, resp(*self._by_hand)),
            "POST /v1/check": (self._agent, post("/v1/check", json.dumps(check("/benchmark")).encode())),
        }
        lines: dict[str, list[tuple[float, float]]] = {}
        for rate in OFFERED_PER_SECOND:
            for name, (server, request) in asked.items():
                samples = await open_load(server, request, per_second=rate, seconds=self._seconds)
                for part in PARTS:
                    point = rate, percentile_us(samples, part) / 1000
                    lines.setdefault(f"{name}, p{100 * part:g}", []).append(point)
        title = "Latency of a check by offered load (open loop; agent and store on one core)"
        save("agent-latency", picture(title, "requests a second", "ms", lines))

    async def memory(self) -> list[Fact]:
        samples: dict[str, list[float]] = {"the goal": [KEY_BYTES]}
        for algorithm in RateAlgorithm:
            samples[algorithm.value] = [await self._bytes_a_key(algorithm)]
        return facts(samples)

    async def _bytes_a_key(self, algorithm: RateAlgorithm) -> float:
        """Return the store's memory per caller, for many callers with one request each."""
        before = await self._connection.number_of("memory", "used_memory")
        async with httpx.AsyncClient(base_url=self._agent_url) as client:
            for first in range(0, KEYS, 1_000):
                checks = [check(f"/{algorithm}", f"tenant-{each}") for each in range(first, first + 1_000)]
                answer = await client.post("/v1/check:batch", json={"checks": checks})
                answer.raise_for_status()
        return (await self._connection.number_of("memory", "used_memory") - before) / KEYS

    def _reference(self, connections: int, pipeline: int = 1) -> dict[str, Turn]:
        """Return redis-benchmark's figures, or None if it is not installed: then our own generator is the reference."""
        if found() is None:
            return {}
        name = "redis-benchmark FCALL check" + (f" -P {pipeline}" if pipeline > 1 else "")
        turn = RedisBenchmark(
            self._store_url, self._by_hand, connections=connections, seconds=self._seconds, pipeline=pipeline
        )
        return {name: turn}

    async def _checked(
        self, asked: Callable[..., Awaitable[Load]], route: str, accepted: bytes = b"HTTP/1.1 200"
    ) -> Load:
        request = post("/v1/check", json.dumps(check(route)).encode())
        return await self._counted(partial(asked, self._agent, request, accepted=accepted))

    async def _counted(self, turn: Turn) -> Load:
        """Run the load, and return the figures with the number of scripts per decision."""
        before = await self._connection.scripts_run()
        begun = time.perf_counter()
        done = await turn()
        decisions = done.per_second * (time.perf_counter() - begun)
        return done._replace(store_calls=(await self._connection.scripts_run() - before) / decisions)


def times(load: Load, checks: int) -> Load:
    """Checks a second, where requests were counted."""
    return load._replace(per_second=load.per_second * checks)


# --- the call that the agent makes


class Recorder(StoreConnection):
    """A connection that remembers what it was asked last."""

    last: tuple[Argument, ...] = ()
    password = ""

    async def call(self, *arguments: Argument) -> Reply:
        self.last = arguments
        return await super().call(*arguments)

    async def number_of(self, section: str, field: str) -> int:
        info: bytes = await super().call("INFO", section)
        lines = (line.partition(b":") for line in info.splitlines())
        return next((int(value) for name, _, value in lines if name == field.encode()), 0)

    async def scripts_run(self) -> int:
        info: bytes = await super().call("INFO", "commandstats")
        lines = [line for line in info.splitlines() if line.startswith(b"cmdstat_fcall:")]
        return sum(int(line.partition(b"calls=")[2].partition(b",")[0]) for line in lines)


@asynccontextmanager
async def the_store(url: str) -> AsyncIterator[Recorder]:
    connected = asyncio.Event()
    recorder = Recorder(StoreServer.at(url), timeout_ms=1_000, on_connected=connected.set)
    recorder.password = url.rpartition("@")[0].rpartition(":")[2]
    recorder.keep()
    try:
        await asyncio.wait_for(connected.wait(), PATIENCE_S)
        yield recorder
    finally:
        await recorder.close()


async def the_same_call(recorder: Recorder) -> list[str]:
    """Return what the agent sends to its store for a check, without other requests."""
    scripts = Scripts(recorder)
    fence = await scripts.read_fence()
    assert fence.fingerprint is not None
    assert fence.epoch is not None
    assert fence.lanes is not None
    charge = RateCharge(quota_key("plenty", [("tenant", "acme")]), 1, PLENTY_PER_SECOND * 1_000, PLENTY_PER_SECOND)
    await scripts.check(StoreIncarnation(fence.fingerprint, fence.epoch, fence.lanes), "enforce", [charge])
    return [part.decode() if isinstance(part, bytes) else str(part) for part in recorder.last]


# --- without any store


def matching(repeats: int) -> list[Fact]:
    documents = {number: many_policies(number) for number in NUMBERS_OF_POLICIES}
    samples: dict[int, list[float]] = {number: [] for number in documents}
    for round_ in range(repeats):
        for number, document in documents.items():
            samples[number].append(ns_a_match(document, round_))
    return facts({f"{number:,} policies": each for number, each in samples.items()})


def many_policies(number: int) -> LimitsDocument:
    """Half of them by prefix, half by the whole route."""
    routes = [f"/v1/thing-{each:05}{'/*' if each % 2 else ''}" for each in range(number)]
    policies = [
        {"name": f"policy-{place}", "match": {"route": route}, "by": ["tenant"], "quota": "plenty"}
        for place, route in enumerate(routes)
    ]
    quotas = [{"name": "plenty", "kind": "rate", "limit": "10/second"}]
    return msgspec.convert({"plans": PLANS, "quotas": quotas, "policies": policies}, LimitsDocument)


def ns_a_match(document: LimitsDocument, round_: int) -> float:
    number = len(document.policies)
    policies = Policies(PolicyBundle(version=1, document=document, subscriptions={}, weight=1, total_weight=1))
    asked = [
        {"route": f"/v1/thing-{each * 37 % number:05}/{round_}-{each}", "method": "GET"} for each in range(MATCHES)
    ]
    begun = time.perf_counter_ns()
    for subject in asked:
        policies.match(subject)
    return (time.perf_counter_ns() - begun) / MATCHES
