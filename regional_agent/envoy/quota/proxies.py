"""The proxies that are connected, and the buckets that they report.

A proxy is one stream. The header `x-leasehold-proxy` names it. A later stream of that name is the same proxy, and takes
over what the one before had. Without the header, that stays reserved until it has expired.
"""

import asyncio
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from regional_agent.envoy.quota.messages import BucketId, Strategy, encode_action, encode_bucket_id, encode_response
from regional_agent.envoy.quota.planning import BucketPlan

PROXY_HEADER = "x-leasehold-proxy"
MAX_NAME = 64


class Bucket(Struct, eq=False, gc=False):
    """One bucket of one proxy."""

    proxy: "Proxy"
    id: BucketId
    encoded_id: bytes
    plan: BucketPlan
    requested_ms: int  # when it last reported a request
    used: int = 0  # requests, since the proxy connected
    denied: int = 0
    sent: Strategy = None
    sent_ms: int = 0


class DueMessage(NamedTuple):
    """A message to send, and since when the oldest assignment in it waits, by the clock of the event loop."""

    message: bytes
    since_s: float


class Proxy:
    def __init__(self, name: str, domain: str, now_ms: int) -> None:
        self.name = name
        self.domain = domain
        self.connected_ms = self.reported_ms = self.refreshed_ms = now_ms
        self.is_connected = True
        self.buckets: dict[BucketId, Bucket] = {}
        self.sent = 0  # messages
        self._due: dict[bytes, bytes] = {}  # the action to send next, by encoded bucket id
        self._due_since_s = 0.0
        self._wake = asyncio.Event()

    def add(self, bucket: BucketId, plan: BucketPlan, now_ms: int) -> Bucket:
        added = self.buckets[bucket] = Bucket(self, bucket, encode_bucket_id(bucket), plan, now_ms)
        return added

    def send(self, bucket: Bucket, strategy: Strategy, now_ms: int) -> None:
        """Send an assignment with the next message."""
        bucket.sent, bucket.sent_ms = strategy, now_ms
        if not self._due:
            self._due_since_s = asyncio.get_running_loop().time()
        self._due[bucket.encoded_id] = encode_action(strategy)
        self._wake.set()

    async def next_message(self) -> DueMessage:
        """Wait for something to send. Only the last assignment of a bucket is sent."""
        await self._wake.wait()
        self._wake.clear()
        due, self._due = self._due, {}
        self.sent += 1
        return DueMessage(encode_response(due.items()), self._due_since_s)

    def forget_unsent(self) -> None:
        self._due.clear()
        self._wake.clear()


class Proxies:
    """All proxies of an agent, bounded in number."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: dict[str, Proxy] = {}
        self._sent_before = 0  # messages, to proxies that are forgotten

    def connect(self, peer: str, metadata: Mapping[str, str], domain: str, now_ms: int) -> Proxy | None:
        """Return the proxy of a stream; None if there are as many as there may be."""
        name = metadata.get(PROXY_HEADER, "")[:MAX_NAME]
        before = self._all.get(name)
        if before is not None and not before.is_connected and before.domain == domain:
            before.is_connected, before.connected_ms = True, now_ms
            before.forget_unsent()
            return before
        if sum(each.is_connected for each in self._all.values()) >= self._most:
            return None
        name = name if name and before is None else self._free_name(f"{name}@{peer}" if name else peer)
        proxy = self._all[name] = Proxy(name, domain, now_ms)
        return proxy

    def _free_name(self, name: str) -> str:
        free, number = name, 1
        while free in self._all:
            number += 1
            free = f"{name}#{number}"
        return free

    def forget(self, proxy: Proxy) -> None:
        self._sent_before += proxy.sent
        self._all.pop(proxy.name, None)

    @property
    def sent(self) -> int:
        """Return the messages that were sent to all proxies."""
        return self._sent_before + sum(each.sent for each in self._all.values())

    def __iter__(self) -> Iterator[Proxy]:
        return iter(list(self._all.values()))
