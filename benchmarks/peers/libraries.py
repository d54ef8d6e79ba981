"""One library of another's, used as its documentation shows it: `python libraries.py limits`.

Each is asked through its asynchronous interface, under a limit that is never reached.
"""

import asyncio
import os
import sys

from closed_loop import Ask, serve

STORE_URL = os.environ["STORE_URL"]
PER_MINUTE = int(os.environ["PER_MINUTE"])


async def limits_fixed_window() -> Ask:
    from limits import parse
    from limits.aio.storage import RedisStorage
    from limits.aio.strategies import FixedWindowRateLimiter

    limiter = FixedWindowRateLimiter(RedisStorage(f"async+{STORE_URL}"))
    item = parse(f"{PER_MINUTE}/minute")
    return lambda key: limiter.hit(item, key)


async def limits_sliding_window() -> Ask:
    from limits import parse
    from limits.aio.storage import RedisStorage
    from limits.aio.strategies import SlidingWindowCounterRateLimiter

    limiter = SlidingWindowCounterRateLimiter(RedisStorage(f"async+{STORE_URL}"))
    item = parse(f"{PER_MINUTE}/minute")
    return lambda key: limiter.hit(item, key)


async def throttled_fixed_window() -> Ask:
    return _throttled("fixed_window")


async def throttled_token_bucket() -> Ask:
    return _throttled("token_bucket")


def _throttled(algorithm: str) -> Ask:
    from throttled.asyncio import Throttled, rate_limiter, store

    throttle = Throttled(
        using=algorithm,
        quota=rate_limiter.per_min(PER_MINUTE, burst=PER_MINUTE),
        store=store.RedisStore(server=STORE_URL),
    )

    async def ask(key: str) -> bool:
        return not (await throttle.limit(key)).limited

    return ask


async def pyrate_token_bucket() -> Ask:
    from pyrate_limiter import BucketFactory, Limiter, Rate, RateItem
    from pyrate_limiter.abstracts.algorithm import TokenBucket
    from pyrate_limiter.buckets.redis_state import RedisStateStore
    from pyrate_limiter.buckets.state_bucket import StateBucket
    from pyrate_limiter.clocks import WallClock
    from redis.asyncio import Redis

    class OneBucketForEachKey(BucketFactory):
        def __init__(self) -> None:
            self._redis = Redis.from_url(STORE_URL)
            self._clock = WallClock()
            self._buckets: dict[str, StateBucket] = {}

        def wrap_item(self, name: str, weight: int = 1) -> RateItem:
            return RateItem(name, self._clock.now(), weight=weight)

        def get(self, item: RateItem) -> StateBucket:
            bucket = self._buckets.get(item.name)
            if bucket is None:
                rate = Rate(PER_MINUTE, 60_000, burst=PER_MINUTE)
                store = RedisStateStore(self._redis, f"pyrate-{item.name}")
                bucket = self._buckets[item.name] = StateBucket([rate], algorithm=TokenBucket(), store=store)
            return bucket

    limiter = Limiter(OneBucketForEachKey())
    return lambda key: limiter.try_acquire_async(key, blocking=False)


ASKS = {
    "limits": limits_fixed_window,
    "limits-sliding": limits_sliding_window,
    "throttled-py": throttled_fixed_window,
    "throttled-py-bucket": throttled_token_bucket,
    "pyrate-limiter": pyrate_token_bucket,
}


async def main(name: str) -> None:
    await serve(await ASKS[name]())


try:
    import uvloop

    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
except ImportError:
    runner = asyncio.Runner()
with runner:
    runner.run(main(sys.argv[1]))
