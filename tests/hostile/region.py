"""A region with a valid token that sends absurd numbers, invented periods, keys and epochs, and gaps."""

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from protocol.identifiers import lane_of
from protocol.units import MAX_UNITS

REGION = "hostile"
FINGERPRINT = "a store that does not exist"
MINUTE = 29_900_000
TRANSPORT_S = 60.0
KEYS_AT_ONCE = 500
AMOUNTS = (MAX_UNITS, MAX_UNITS - 10, 10**12, 10**15)


class HostileRegion:
    def __init__(self, coordinator: str, token: str, victims: Sequence[str], period: str, seed: int) -> None:
        self.statuses: dict[str, Counter[int]] = {}  # answers by attack
        self.outcomes: Counter[str] = Counter()  # outcomes of the exchanges that were parsed
        self._base = f"{coordinator}/v1/regions/{REGION}"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._victims, self._period = victims, period
        self._chance = random.Random(seed)
        self._epoch, self._lanes = 0, 4
        self._stopping = False
        self._attack = ""
        self._http: httpx.AsyncClient

    def stop(self) -> None:
        self._stopping = True

    async def run(self) -> None:
        """Attack in turns until `stop` is called."""
        attacks = [each for name, each in vars(HostileRegion).items() if name.startswith("attack_")]
        async with httpx.AsyncClient(timeout=TRANSPORT_S, trust_env=False, headers=self._headers) as self._http:
            while not self._stopping:
                for attack in self._chance.sample(attacks, len(attacks)):
                    self._attack = attack.__name__.removeprefix("attack_")
                    await attack(self)
                    await asyncio.sleep(0)

    # --- attacks ------------------------------------------------------------------------------------------------------

    async def attack_absurd_totals(self) -> None:
        """Bill honest tenants more than could ever be used, in an epoch that was granted nothing."""
        await self._open(journal=True)
        for victim in self._victims:
            await self._report(1, [_lease(victim, self._period, self._chance.choice(AMOUNTS))], victim)

    async def attack_absurd_wants(self) -> None:
        await self._open()
        for victim in self._victims:
            await self._exchange(
                victim, 1, [], [{"quota": victim, "waiting": MAX_UNITS, "demand_milli": MAX_UNITS, "held": MAX_UNITS}]
            )

    async def attack_invented_periods(self) -> None:
        await self._open(journal=True)
        year = self._chance.randrange(1, 9999)
        hours = [f"{year:04}-{1 + n // 480:02}-{1 + n // 24 % 20:02}T{n % 24:02}" for n in range(KEYS_AT_ONCE)]
        quota = self._chance.choice([*self._victims, "invented:tenant=x"])
        await self._report(1, [_lease(quota, hour, 1) for hour in hours], quota)

    async def attack_offsets_of_a_zone(self) -> None:
        await self._open(journal=True)
        periods = [f"{self._period}_Europe:Berlin_{offset}" for offset in range(-200, 200)]
        await self._report(1, [_lease(self._victims[0], period, 1) for period in periods], self._victims[0])

    async def attack_invented_keys(self) -> None:
        await self._open()
        keys = self._keys_of_a_lane()
        await self._exchange(keys[0], 1, [], [{"quota": key, "waiting": 1} for key in keys])

    async def attack_usage_of_invented_keys(self) -> None:
        await self._open(journal=True)
        keys = self._keys_of_a_lane()
        await self._report(1, [_lease(key, self._period, 1) for key in keys], keys[0])

    async def attack_gaps(self) -> None:
        large = _lease(self._victims[0], self._period, 1000)
        large["lines"] = [large["lines"][0] | {"units": 1, "dimensions": {"k": "x" * 250}}] * 1000
        await self._open()
        for seq in self._chance.sample(range(2, 2**50), 4):
            await self._report(seq, [large], self._victims[0])

    async def attack_totals_never_given(self) -> None:
        await self._open()
        lease = _lease(self._victims[0], self._period, 5) | {"granted": MAX_UNITS}
        await self._report(1, [lease], self._victims[0])

    async def attack_epochs(self) -> None:
        for journal in (True, False):
            for _ in range(20):
                await self._open(journal=journal)

    async def attack_shares(self) -> None:
        absurd = {"demand_micro": MAX_UNITS, "number": self._chance.choice([0, 1, MAX_UNITS]), "rate_micro": MAX_UNITS}
        names = ["api:tenant=honest1", *(f"api:tenant={secrets.token_hex(8)}" for _ in range(100))]
        rates = [{"quota": name, "spent": MAX_UNITS, **absurd} for name in names]
        await self._post("shares", {"rates": rates})

    async def attack_garbage(self) -> None:
        batch = {"epoch": self._epoch, "lane": 0, "seq": 1, "leases": [_lease("/" * 600, "1990-13", -1)]}
        for frozen in ("{}", "null", "[" * 5000, msgspec.json.encode(batch).decode()):
            await self._send([{"frozen": frozen, "live": {"demands": [{"quota": "x" * 5000}, 7]}}])

    # --- requests -----------------------------------------------------------------------------------------------------

    def _keys_of_a_lane(self) -> list[str]:
        lane = self._chance.randrange(self._lanes)
        keys = (f"exports:tenant={secrets.token_hex(8)}" for _ in range(KEYS_AT_ONCE * 2 * self._lanes))
        return [key for key in keys if lane_of(key, self._lanes) == lane][:KEYS_AT_ONCE]

    async def _open(self, *, journal: bool = False) -> None:
        body = {"nonce": secrets.token_hex(16), "fingerprint": FINGERPRINT, "journal": journal, "lost_data": False}
        answer = await self._post("epochs", body)
        if answer.status_code == httpx.codes.OK:
            self._epoch, self._lanes = answer.json()["epoch"], answer.json()["lanes"]

    async def _report(self, seq: int, leases: Sequence[Any], quota: str) -> None:
        await self._exchange(quota, seq, leases, [])

    async def _exchange(self, quota: str, seq: int, leases: Sequence[Any], demands: Sequence[Any]) -> None:
        batch = {"epoch": self._epoch, "lane": lane_of(quota, self._lanes), "seq": seq, "leases": leases}
        await self._send([{"frozen": msgspec.json.encode(batch).decode(), "live": {"demands": demands}}])

    async def _send(self, exchanges: Sequence[Any]) -> None:
        body = {"fingerprint": FINGERPRINT, "exchanges": exchanges}
        answer = await self._post("exchanges", body)
        if answer.status_code == httpx.codes.OK:
            self.outcomes.update(reply["outcome"] for reply in answer.json()["replies"])

    async def _post(self, path: str, body: Any) -> httpx.Response:
        answer = await self._http.post(f"{self._base}/{path}", json=body)
        self.statuses.setdefault(self._attack, Counter())[answer.status_code] += 1
        return answer


def _lease(quota: str, period: str, consumed: int) -> dict[str, Any]:
    line = {"minute": MINUTE, "dimensions": {"policy": "export"}, "units": consumed}
    totals = {"granted": 0, "overage": 0, "consumed": consumed, "returned": 0}
    return {"quota": quota, "period": period, **totals, "lines": [line]}
