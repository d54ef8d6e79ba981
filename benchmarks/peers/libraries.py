"""One library of another's, asked as its own documentation says: `python libraries.py limits`."""

import asyncio
import os
import sys

from closed_loop import Ask, measure

STORE_URL = os.environ["STORE_URL"]
LIMIT = 1_000_000
KEY = "acme"


async def limits_fixed_window() -> Ask:
    from limits import parse
    from limits.aio.storage import RedisStorage
    from limits.aio.strategies import FixedWindowRateLimiter

    limiter = FixedWindowRateLimiter(RedisStorage(f"async+{STORE_URL}"))
    item = parse(f"{LIMIT}/second")
    return lambda: limiter.hit(item, KEY)


async def limits_sliding_window() -> Ask:
    from limits import parse
    from limits.aio.storage import RedisStorage
    from limits.aio.strategies import SlidingWindowCounterRateLimiter

    limiter = SlidingWindowCounterRateLimiter(RedisStorage(f"async+{STORE_URL}"))
    item = parse(f"{LIMIT}/second")
    return lambda: limiter.hit(item, KEY)


async def throttled_token_bucket() -> Ask:
    from throttled.asyncio import RateLimiterType, Throttled, rate_limiter, store

    throttle = Throttled(
        using=RateLimiterType.TOKEN_BUCKET.value,
        quota=rate_limiter.per_sec(LIMIT, burst=LIMIT),
        store=store.RedisStore(server=STORE_URL),
    )

    async def ask() -> bool:
        return not (await throttle.limit(KEY)).limited

    return ask


async def pyrate_token_bucket() -> Ask:
    from pyrate_limiter import Limiter, Rate
    from pyrate_limiter.abstracts.algorithm import TokenBucket
    from pyrate_limiter.buckets.redis_state import RedisStateStore
    from pyrate_limiter.buckets.state_bucket import StateBucket
    from redis.asyncio import Redis

    shared = RedisStateStore(Redis.from_url(STORE_URL), "pyrate-benchmark")
    limiter = Limiter(StateBucket([Rate(LIMIT, 1_000, burst=LIMIT)], algorithm=TokenBucket(), store=shared))
    return lambda: limiter.try_acquire_async(KEY, blocking=False)


ASKS = {
    "limits": limits_fixed_window,
    "limits-sliding": limits_sliding_window,
    "throttled-py": throttled_token_bucket,
    "pyrate-limiter": pyrate_token_bucket,
}


async def main(name: str) -> None:
    await measure(await ASKS[name]())


try:
    import uvloop

    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
except ImportError:
    runner = asyncio.Runner()
with runner:
    runner.run(main(sys.argv[1]))
