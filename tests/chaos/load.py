"""The load, and the journal of the answers it got, with which the ledger is compared.

Every check has an operation_id and is sent again after a lost answer, to any agent of its region, until it is answered.
So the journal knows for each unit whether a service was allowed to use it. It cannot know whether a unit was also
charged in an incarnation of the store that lost it. Such units are counted apart.
"""

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import httpx

from tests.chaos.pieces import AGENTS, REGIONS, TENANTS

AT_ONCE = 4
PAUSE_S = 0.005
AGAIN_S = 0.05
LARGEST_COST = 3
TRANSPORT_S = 10.0
ANSWERS = {200, 429}  # after any other the outcome is unknown


@dataclass
class Journal:
    admitted: Counter[str] = field(default_factory=Counter)  # by tenant, in units
    unsure: Counter[str] = field(default_factory=Counter)  # in units that were sent more than once, admitted or not
    answers: Counter[int] = field(default_factory=Counter)
    cut_off: int = 0


class Load:
    def __init__(self, agents: dict[str, str], seed: int) -> None:
        self.journal = Journal()
        self._agents = agents
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._run = f"{seed}-{random.SystemRandom().getrandbits(32)}"
        self._stopping = False

    async def run(self) -> None:
        """Run until `stop` is called, and then finish every operation that is in progress."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=TRANSPORT_S, trust_env=False, limits=limits) as http:
            await asyncio.gather(*(self._work(http, region) for region in REGIONS for _ in range(AT_ONCE)))

    def stop(self) -> None:
        self._stopping = True

    async def _work(self, http: httpx.AsyncClient, region: str) -> None:
        while not self._stopping:
            tenant = self._random.choice(tuple(TENANTS))
            await self._operation(http, region, tenant, self._random.randint(1, LARGEST_COST))
            await asyncio.sleep(PAUSE_S)

    async def _operation(self, http: httpx.AsyncClient, region: str, tenant: str, cost: int) -> None:
        body = {
            "subject": {"tenant": tenant, "route": "/v1/exports"},
            "cost": cost,
            "operation_id": f"{self._run}-{next(self._numbers)}",
        }
        status = await self._ask(http, region, body)
        if status not in ANSWERS:
            self.journal.unsure[tenant] += cost
        while status not in ANSWERS:
            await asyncio.sleep(AGAIN_S)
            status = await self._ask(http, region, body)
        if status == 200:
            self.journal.admitted[tenant] += cost

    async def _ask(self, http: httpx.AsyncClient, region: str, body: dict[str, object]) -> int:
        agent = self._random.choice([name for name, where in AGENTS.items() if where == region])
        try:
            answer = await http.post(f"{self._agents[agent]}/v1/check", json=body)
        except httpx.HTTPError:
            self.journal.cut_off += 1
            return 0
        self.journal.answers[answer.status_code] += 1
        return answer.status_code
