"""A local program that calls an agent with long names, absurd costs, floods of keys, and half requests."""

import asyncio
import contextlib
import random
import secrets
from collections import Counter
from typing import Any

import httpx

from protocol.units import MAX_UNITS

TRANSPORT_S = 30.0
PAUSE_S = 0.05
HALF_CONNECTIONS = 50
MOST_HALF_CONNECTIONS = 500
NEW_TENANTS = 200
LONG_NAMES = ("/" * 170, "é" * 100, "x" * 256, "tab\there", "line\nbreak", "\u202e", "😀" * 64, "..//..%2f", "=" * 250)
HALVES = (b"", b"POST /v1/ch", b"POST /v1/check HTTP/1.1\r\nHost: localhost\r\nX: ", b"GET / HTTP/1.1\nHost: x\n")
ROUTES = ("/v1/exports", "/v1/search")
TENANT = "hostile-"  # prefix of its tenants' names


class HostileCaller:
    def __init__(self, agent: str, seed: int) -> None:
        self.statuses: dict[str, Counter[int]] = {}  # answers by attack
        self._agent = agent
        self._chance = random.Random(seed)
        self._stopping = False
        self._attack = ""
        self._halves: list[asyncio.StreamWriter] = []
        self._http: httpx.AsyncClient

    def stop(self) -> None:
        self._stopping = True

    async def run(self) -> None:
        """Attack in turns until `stop` is called."""
        attacks = [each for name, each in vars(HostileCaller).items() if name.startswith("attack_")]
        async with httpx.AsyncClient(base_url=self._agent, timeout=TRANSPORT_S, trust_env=False) as self._http:
            while not self._stopping:
                for attack in self._chance.sample(attacks, len(attacks)):
                    self._attack = attack.__name__.removeprefix("attack_")
                    await attack(self)
                    await asyncio.sleep(PAUSE_S)
        for half in self._halves:
            half.transport.abort()

    # --- attacks ------------------------------------------------------------------------------------------------------

    async def attack_long_names(self) -> None:
        for name in LONG_NAMES:
            await self._check({"tenant": name, "route": self._chance.choice(ROUTES)})
            await self._post("/v1/holds", self._hold(name, 1, 1000))

    async def attack_absurd_adjustments(self) -> None:
        for units in (MAX_UNITS, 10**13, 10**7 + 1):
            for route in ROUTES:
                await self._check(self._subject(route), cost=units, mode="adjust")
            checks = [{"subject": self._subject(), "cost": units, "mode": "adjust"} for _ in range(50)]
            await self._post("/v1/check:batch", {"checks": checks})

    async def attack_malformed_items(self) -> None:
        checks = [{"subject": self._subject(), "cost": cost} for cost in (-1, 0, 1.5, "1", None, 2**63)]
        await self._post("/v1/check:batch", {"checks": [*checks, 7, {"subject": {"shoe": 1}}]})

    async def attack_new_tenants(self) -> None:
        checks = [{"subject": self._subject()} for _ in range(NEW_TENANTS)]
        await self._post("/v1/check:batch", {"checks": checks})

    async def attack_holds(self) -> None:
        tenant = TENANT + secrets.token_hex(8)
        answer = await self._post("/v1/holds", self._hold(tenant, 5, 86_400_000))
        await self._post("/v1/holds", self._hold(tenant, MAX_UNITS, 86_400_000))
        if answer.status_code == httpx.codes.CREATED:
            hold_id = answer.json()["hold_id"]
            forged = ("A" if hold_id[0] != "A" else "B") + hold_id[1:]
            await self._post(f"/v1/holds/{forged}:extend", {"ttl_ms": 86_400_000})
            await self._post(f"/v1/holds/{hold_id}:commit", {"units": MAX_UNITS})
            await self._post(f"/v1/holds/{hold_id}:release", {})

    async def attack_operation_ids(self) -> None:
        subject, operation_id = self._subject(), secrets.token_hex(8)
        for cost in (1, 2, 1):
            await self._check(subject, cost=cost, operation_id=operation_id)

    async def attack_half_requests(self) -> None:
        """Open connections and never finish the requests on them."""
        host, _, port = self._agent.removeprefix("http://").rpartition(":")
        for _ in range(HALF_CONNECTIONS if len(self._halves) < MOST_HALF_CONNECTIONS else 0):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(self._chance.choice(HALVES))
                self._halves.append(writer)
        self._halves = [each for each in self._halves if not each.is_closing()]

    async def attack_other_hosts(self) -> None:
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            await self._post("/v1/check", {"subject": self._subject()}, headers)

    async def attack_garbage(self) -> None:
        for body in (b"[" * 100_000, b"{}", b"\x00", b'{"subject":' + b'{"a":' * 500, b"x" * 1_000_000):
            await self._send("/v1/check", body, {})

    # --- requests -----------------------------------------------------------------------------------------------------

    def _subject(self, route: str = "/v1/exports") -> dict[str, str]:
        return {"tenant": TENANT + secrets.token_hex(8), "route": route}

    def _hold(self, tenant: str, units: int, ttl_ms: int) -> dict[str, Any]:
        subject = {"tenant": tenant, "route": "/v1/exports"}
        return {"subject": subject, "units": units, "ttl_ms": ttl_ms, "operation_id": secrets.token_hex(8)}

    async def _check(self, subject: dict[str, str], **rest: Any) -> None:
        await self._post("/v1/check", {"subject": subject, **rest})

    async def _post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        request = self._http.build_request("POST", path, json=body, headers=headers)
        return await self._sent(request)

    async def _send(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        content_type = {"Content-Type": "application/json"}
        await self._sent(self._http.build_request("POST", path, content=body, headers=content_type | headers))

    async def _sent(self, request: httpx.Request) -> httpx.Response:
        answer = await self._http.send(request)
        self.statuses.setdefault(self._attack, Counter())[answer.status_code] += 1
        return answer
