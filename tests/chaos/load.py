"""The load, and the journal of the answers it got, with which the ledger is compared.

Every check has an operation_id and is sent again after a lost answer, to any agent of its region, until it is answered.
So the journal knows for each unit whether a service was allowed to use it. It cannot know whether a unit was also
charged in an incarnation of the store that lost it. Such units are counted apart.
"""

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.pieces import TENANTS

AT_ONCE = 4
PAUSE_S = 0.005
AGAIN_S = 0.05
LARGEST_COST = 3
TRANSPORT_S = 10.0
ANSWERS = {200, 429}  # after any other the outcome is unknown
ROUTE = "/v1/exports"


@dataclass
class Journal:
    admitted: Counter[str] = field(default_factory=Counter)  # by tenant, in units
    unsure: Counter[str] = field(default_factory=Counter)  # in units that were sent more than once, admitted or not
    answers: Counter[int] = field(default_factory=Counter)
    cut_off: int = 0


class Load:
    """Callers in each region. `note` is called with each answer.

    `agents` are the URLs of each region's agents. Another thread may change them, as a load balancer does.
    """

    def __init__(
        self,
        agents: Mapping[str, Sequence[str]],
        seed: int,
        *,
        tenants: Sequence[str] = tuple(TENANTS),
        routes: Sequence[str] = (ROUTE,),
        pause_s: float = PAUSE_S,
        note: Callable[[int, bytes], None] = lambda _status, _body: None,
    ) -> None:
        self.journal = Journal()
        self._agents, self._tenants, self._routes, self._pause_s, self._note = agents, tenants, routes, pause_s, note
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._run = f"{seed}-{random.SystemRandom().getrandbits(32)}"
        self._stopping = False

    async def run(self) -> None:
        """Run until `stop` is called, and then finish every operation that is in progress."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=TRANSPORT_S, trust_env=False, limits=limits) as http:
            places = itertools.product(self._agents, range(AT_ONCE))
            await asyncio.gather(*(self._work(http, region, number) for region, number in places))

    def stop(self) -> None:
        self._stopping = True

    async def _work(self, http: httpx.AsyncClient, region: str, number: int) -> None:
        """Check one route again and again, so that one whose checks are refused holds no other up."""
        route = self._routes[number % len(self._routes)]
        while not self._stopping:
            subject = {"tenant": self._random.choice(self._tenants), "route": route}
            await self._operation(http, region, subject, self._random.randint(1, LARGEST_COST))
            await asyncio.sleep(self._pause_s)

    async def _operation(self, http: httpx.AsyncClient, region: str, subject: dict[str, str], cost: int) -> None:
        tenant = subject["tenant"]
        body = {
            "subject": subject,
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
        while not (agents := self._agents[region]):  # noqa: ASYNC110 - another thread replaces the only one
            await asyncio.sleep(AGAIN_S)
        try:
            answer = await http.post(f"{self._random.choice(agents)}/v1/check", json=body)
        except httpx.HTTPError:
            self.journal.cut_off += 1
            self._note(0, b"")
            return 0
        self.journal.answers[answer.status_code] += 1
        self._note(answer.status_code, answer.content)
        return answer.status_code


def reason_of(status: int, body: bytes) -> str:
    """Return the reason of a denial, or the kind of problem."""
    if status == 0:
        return "no answer"
    found: Any = json.loads(body)
    reasons = [each["reason"] for each in found.get("policies", ()) if each.get("reason")]
    return str(reasons[0] if reasons else str(found.get("type", "")).rpartition("/")[2])
