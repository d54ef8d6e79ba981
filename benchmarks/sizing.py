"""What a million checks leave in PostgreSQL, by pattern, in a minute: a short form of `booking`.

One hot key is measured from its first check on, when its reports come most often: after 1, 2, 4, ... seconds, and later
once a minute. Cold keys are checked once each, so their transfers do not depend on time. Rates come first: they leave
nothing, and the leases of allowances are renewed behind whatever follows.
"""

import asyncio
from collections.abc import Sequence

import asyncpg

from benchmarks.booking import PLENTY, Bench, Stream, for_a_million
from benchmarks.frame import Case, Lines
from benchmarks.stack import PLANS, REGION, local_stack, put_limits

HOT_A_SECOND, COLD_A_SECOND = 500, 300
LASTS_S = 10.0
BOOKED_WITHIN_S = 5.0  # the first usage of a key is reported a second later
QUOTAS: dict[str, dict[str, object]] = {
    "rate": {"name": "rate", "kind": "rate", "limit": "1000000/second"},
    "allowance": {"name": "month", "kind": "allowance", "limit": PLENTY, "period": "month"},
}
LIMITS: dict[str, object] = {
    "plans": PLANS,
    "quotas": list(QUOTAS.values()),
    "policies": [
        {"name": kind, "match": {"route": f"/{kind}"}, "by": ["tenant"], "quota": quota["name"], "wait": "5s"}
        for kind, quota in QUOTAS.items()
    ],
}


async def run(_repeats: int, _seconds: float, port: int) -> dict[str, Lines]:
    async with local_stack(port) as stack:
        warm = {"subject": {"tenant": "warm", "route": "/allowance", "method": "GET"}}
        await put_limits(stack, LIMITS, warm)
        postgres = await asyncpg.connect(stack["postgres"])
        try:
            bench = Bench(stack, postgres, LASTS_S)
            rows = [await _measured(bench, kind, pattern) for kind in QUOTAS for pattern in ("hot", "cold")]
            return {"in PostgreSQL for a million checks": rows}
        finally:
            await postgres.close()


async def _measured(bench: Bench, kind: str, pattern: str) -> Case:
    per_second = HOT_A_SECOND if pattern == "hot" else COLD_A_SECOND
    tenants: Sequence[str] = ["hot"] if pattern == "hot" else [f"cold-{n}" for n in range(round(LASTS_S * per_second))]
    before = await bench.count()
    checks = await bench.load([Stream(REGION, tenants, [f"/{kind}"], per_second)], LASTS_S)
    await asyncio.sleep(BOOKED_WITHIN_S)
    found = (await bench.count()).since(before)
    name = f"{kind}, " + (f"one key for {LASTS_S:.0f} s" if pattern == "hot" else f"{len(tenants):,} keys, once each")
    return Case(name, for_a_million(found, checks))
