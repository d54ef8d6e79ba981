"""One region of a real stack in which faults are made, with actions on its processes and readings of their state."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx

from leasehold.local_stack.processes import wait_until
from protocol.clock import SystemClock
from protocol.limits.document import PeriodKind
from protocol.periods import Calendar, period_at
from tests.chaos.pieces import AGENTS, Piece, Stack

REGION = "eu-west"
AGENT = "agent-eu-west"
STORE = f"store-{REGION}"
SMALL_LIMIT = 20
LIMITS = {
    "plans": {"small": {}, "large": {}},
    "default_plan": "large",
    "quotas": [
        {
            "name": "exports",
            "kind": "allowance",
            "limit": {"small": SMALL_LIMIT, "large": 10_000_000},
            "period": "month",
        }
    ],
    "policies": [
        {"name": "export", "match": {"route": "/v1/exports"}, "by": ["tenant"], "quota": "exports", "wait": "1s"},
        {
            "name": "open-export",
            "match": {"route": "/v1/open-exports"},
            "by": ["tenant"],
            "quota": "exports",
            "on_store_failure": "open",
        },
    ],
}
READ_WITHIN_S = 4.0
REQUEST_S = 30.0
PATIENCE_S = 60
LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Readiness:
    """The answer of `/readyz`. The status is None where there was no answer."""

    status: int | None
    word: str = ""
    codes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.status is None:
            return "no answer"
        codes = ", ".join(f"`{code}`" for code in self.codes)
        return f"{self.status} {self.word.replace('_', ' ')}" + (f": {codes}" if codes else "")


@dataclass(frozen=True)
class Decision:
    """The answer to a check. The status is None where there was no answer."""

    status: int | None
    problem: str
    reason: str | None
    retry_after_ms: int | None
    took_ms: float
    is_until_the_period_ends: bool = False  # whether retry_after_ms leads to its end


@dataclass
class Scene:
    stack: Stack
    directory: Path
    tenant: str = "before"
    _log_starts: dict[str, int] = field(default_factory=dict)
    _http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=REQUEST_S, trust_env=False))

    @classmethod
    def prepare(cls, directory: Path) -> "Scene":
        """Return a stack of one region, which `begin` starts."""
        environ = {
            "LEASEHOLD_AGENT_LAME_DUCK_MS": "60000",
            "LEASEHOLD_AGENT_JOURNAL_DIR": str(directory / "journal"),
        }
        stack = Stack(directory, environ)
        for name in [*(name for name in AGENTS if name != AGENT), "store-us-east"]:
            del stack.pieces[name]
        return cls(stack, directory)

    def begin(self) -> None:
        self.stack.begin()
        self.stack.ask("PUT", f"{self.stack.coordinator}/v1/limits", LIMITS)

    def end(self) -> None:
        self._http.close()
        process = self.agent.process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGINT)  # without a lame duck period
        self.stack.end()

    # --- pieces ------------------------------------------------------------------------------------------------------

    @property
    def agent(self) -> Piece:
        return self.stack.pieces[AGENT]

    @property
    def store(self) -> Piece:
        return self.stack.pieces[STORE]

    @property
    def coordinator(self) -> Piece:
        return self.stack.pieces["coordinator"]

    @property
    def postgres(self) -> Piece:
        return self.stack.pieces["postgres"]

    def restart(self, piece: Piece) -> None:
        """Kill a piece if it runs, and start it again."""
        piece.kill()
        piece.begin()

    def configure_store(self, setting: str) -> None:
        self.stack.send_to_store(REGION, f"CONFIG SET {setting}")

    def empty_store(self) -> None:
        self.stack.send_to_store(REGION, "FLUSHALL")

    def set_region(self, status: str) -> None:
        self.stack.ask("PUT", f"{self.stack.coordinator}/v1/regions/{REGION}", {"status": status})

    def subscribe(self, plan: str) -> None:
        self.stack.ask("PUT", f"{self.stack.coordinator}/v1/subscriptions/{self.tenant}", {"plan": plan})

    def alter_postgres(self, change: str) -> None:
        """Change a setting of the server, even while its commits hang."""
        asyncio.run(self._alter_postgres(change))

    async def _alter_postgres(self, change: str) -> None:
        connection = await asyncpg.connect(self.stack.owners_url)
        await connection.execute("SET synchronous_commit = off")
        await connection.execute(f"ALTER SYSTEM {change}")
        await connection.execute("SELECT pg_reload_conf()")
        await connection.close()

    # --- requests ----------------------------------------------------------------------------------------------------

    def readiness(self, url: str) -> Readiness:
        try:
            answer = self._http.get(f"{url}/readyz", timeout=READ_WITHIN_S)
        except httpx.TransportError:
            return Readiness(None)
        found = answer.json()
        return Readiness(answer.status_code, found["status"], tuple(each["code"] for each in found["reasons"]))

    def agents_readiness(self) -> Readiness:
        return self.readiness(self.stack.agents[AGENT])

    def coordinators_readiness(self) -> Readiness:
        return self.readiness(self.stack.coordinator)

    def check(self, cost: int = 1, route: str = "/v1/exports") -> Decision:
        began = time.monotonic()
        try:
            answer = self._post("/v1/check", {"subject": {"tenant": self.tenant, "route": route}, "cost": cost})
        except httpx.TransportError:  # the agent is starting
            return Decision(None, "", None, None, 0)
        took_ms = (time.monotonic() - began) * 1000
        body = answer.json()
        denials = [each for each in body.get("policies", ()) if each["policy"] == body.get("denied_by")]
        problem = str(body.get("type", "")).rpartition("/")[2]
        reason = denials[0].get("reason") if denials else None
        retry_after_ms = body.get("retry_after_ms")
        return Decision(answer.status_code, problem, reason, retry_after_ms, took_ms, _is_end_of_month(retry_after_ms))

    def use_much(self) -> None:
        """Spend so few units that the lease lasts for a while without the coordinator."""
        for _ in range(5):
            self.check(1000)

    def hold(self, units: int) -> None:
        body = {
            "subject": {"tenant": self.tenant, "route": "/v1/exports"},
            "units": units,
            "ttl_ms": 60_000,
            "operation_id": self.tenant,
        }
        answer = self._post("/v1/holds", body)
        assert answer.status_code == 201, answer.text

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._http.post(f"{self.stack.agents[AGENT]}{path}", json=body)

    def spend_all(self) -> None:
        """Check until the agent denies."""
        for _ in range(SMALL_LIMIT + 1):
            if self.check().status != 200:
                return
        raise AssertionError("nothing was denied")

    def is_well(self) -> bool:
        """Return whether the region is ready and admits again."""
        readiness = self.agents_readiness()
        return readiness == Readiness(200, "ready") and self.coordinators_readiness() == readiness

    # --- logs --------------------------------------------------------------------------------------------------------

    def mark_logs(self) -> None:
        """Set the mark from which logs are read."""
        self._log_starts = {name: self.stack.log_of(name).stat().st_size for name in (AGENT, "coordinator")}

    def log(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the lines that a service has logged since the mark."""
        with self.stack.log_of(name).open("rb") as log:
            log.seek(self._log_starts[name])
            for line in log.read().splitlines():
                if line.startswith(b"{"):
                    yield json.loads(line)


def _is_end_of_month(retry_after_ms: int | None) -> bool:
    if not retry_after_ms:
        return False
    now = SystemClock().now()
    ends = period_at(Calendar(PeriodKind.MONTH), now).ends_at
    return abs((ends - now) - timedelta(milliseconds=retry_after_ms)) < timedelta(minutes=1)


def wait_for_recovery(scene: Scene) -> None:
    scene.tenant = f"{scene.tenant}-after"
    assert wait_until(lambda: scene.is_well() and scene.check().status == 200, PATIENCE_S), (
        scene.agents_readiness(),
        scene.coordinators_readiness(),
        scene.check(),
    )
