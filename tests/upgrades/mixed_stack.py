"""A stack whose services are replaced one by one, by those of another release."""

import asyncio
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg

from leasehold.local_stack.calls import HttpReply, call
from leasehold.local_stack.processes import wait_until
from tests.chaos.pieces import AGENTS, PATIENCE_S, scope_of
from tests.chaos.replacing import LAME_DUCK_MS, ReplaceableStack, stop_gracefully
from tests.conftest import restricted

# A machine that runs all processes of three places, and other tests, is slower than a store ought to be.
DECISION_MS = "2000"
LIMITS: dict[str, Any] = {
    "plans": {"small": {}, "large": {}},
    "default_plan": "large",
    "quotas": [
        {"name": "exports", "kind": "allowance", "limit": {"small": 300, "large": 10_000_000}, "period": "month"}
        | {"report_within": "100ms"},
        {"name": "search", "kind": "rate", "limit": "4/hour, burst 4", "sharing": "regional"},
        {"name": "mail", "kind": "rate", "limit": "4/second, burst 4", "sharing": "adaptive"},
        {"name": "jobs", "kind": "concurrency", "limit": 2, "sharing": "regional"},
    ],
    "policies": [
        {"name": "export", "match": {"route": "/v1/exports"}, "by": ["tenant"], "quota": "exports", "wait": "5s"},
        {"name": "search", "match": {"route": "/v1/search"}, "by": ["tenant"], "quota": "search"},
        {"name": "mail", "match": {"route": "/v1/mail"}, "by": ["tenant"], "quota": "mail"},
        {"name": "job", "match": {"route": "/v1/jobs"}, "by": ["tenant"], "quota": "jobs"},
    ],
}
# Runs several commands in one process, because a process costs a second.
COMMANDS = """
import json, sys
from importlib import import_module
from typer.testing import CliRunner
app = import_module("leasehold.cli.app").app
for command in json.load(sys.stdin):
    done = CliRunner().invoke(app, command)
    print(json.dumps([done.exit_code, done.stdout, done.stderr]))
"""


class Done(NamedTuple):
    """The output of a command, and its exit status."""

    exit_code: int
    stdout: str
    stderr: str


class MixedStack(ReplaceableStack):
    """Begins with the release before. Every agent knows both addresses of coordinators."""

    def __init__(self, directory: Path, before: Path) -> None:
        environ = {
            "LEASEHOLD_AGENT_LAME_DUCK_MS": LAME_DUCK_MS,
            "LEASEHOLD_AGENT_DECISION_TIMEOUT_MS": DECISION_MS,
            "LEASEHOLD_AGENT_STORE_TIMEOUT_MS": DECISION_MS,
        }
        super().__init__(directory, environ)
        self.before = before
        self.pythons = dict.fromkeys([*AGENTS, "coordinator"], before)

    def begin(self) -> None:
        super().begin()
        self.ask("PUT", f"{self.coordinator}/v1/limits", LIMITS)

    # --- what differs from a stack of one release ---------------------------------------------------------------------

    def _coordinator_for(self, region: str) -> str:
        return ",".join(self.coordinators.values())

    def _agents_environ(self, name: str, region: str) -> dict[str, str]:
        state = {"LEASEHOLD_AGENT_STATE_DIR": str(self._directory / f"{name}-state")}
        return super()._agents_environ(name, region) | state

    def migrate(self) -> None:
        done = self.migrate_with(self.before)
        assert done.exit_code == 0, done.stderr

    def issue_tokens(self) -> None:
        commands = [["token", "create", "--scope", scope_of(name), "--json"] for name in self._tokens]
        for name, done in zip(self._tokens, self.run(self.before, commands), strict=True):
            self._tokens[name] = json.loads(done.stdout)["token"]

    # --- commands -----------------------------------------------------------------------------------------------------

    def run(self, python: Path, commands: Sequence[Sequence[str]], agent: str = "agent-us-east") -> list[Done]:
        """Run commands of a release, as the owner of the database and as an administrator."""
        environ = {
            "LEASEHOLD_URL": self.coordinator,
            "LEASEHOLD_TOKEN": self._tokens["admin"],
            "LEASEHOLD_AGENT_URL": self.agents[agent],
            "LEASEHOLD_MIGRATE_DATABASE_URL": self.owners_url,
            "LEASEHOLD_MIGRATE_COORDINATOR_URL": restricted(self.owners_url),
        }
        printed = run_program(python, COMMANDS, environ, json.dumps(commands))
        return [Done(*json.loads(line)) for line in printed.splitlines()]

    def migrate_with(self, python: Path) -> Done:
        [done] = self.run(python, [["migrate"]])
        return done

    def execute(self, sql: str) -> Any:
        """Return the value that the owner's SQL returns."""
        return asyncio.run(self._execute(sql))

    async def _execute(self, sql: str) -> Any:
        connection = await asyncpg.connect(self.owners_url)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    def check(self, agent: str, body: Mapping[str, Any], path: str = "/v1/check") -> HttpReply:
        return call("POST", f"{self.agents[agent]}{path}", body=body)

    def stop_agents(self) -> None:
        """Stop all agents, which report what may have waited for its report."""
        for name in AGENTS:
            stop_gracefully(self.pieces[name])

    def refusal_of(self, python: Path) -> dict[str, str]:
        """Start a coordinator that must not become ready, and return its reasons. Stop it again."""
        piece, found = self.start_coordinator(python), dict[str, str]()

        def is_refusing() -> bool:
            try:
                answer = call("GET", f"{self.url_of_spare}/readyz")
            except OSError:
                return False
            found.update({each["code"]: each["text"] for each in answer.body["reasons"] if each["code"] != "starting"})
            return bool(found)

        assert wait_until(is_refusing, PATIENCE_S), self.log_of(piece.name).read_text()
        stop_gracefully(piece)
        return found


def run_program(python: Path, program: str, environ: Mapping[str, str], given: str = "", *arguments: str) -> str:
    """Run a program with the packages of a release, and return what it prints."""
    done = subprocess.run(
        [python, "-P", "-c", program, *arguments],
        input=given, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
