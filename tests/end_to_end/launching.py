"""Helpers that start `leasehold up` as a process, for tests from outside."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leasehold.local_stack.calls import HttpReply, call
from leasehold.local_stack.data_directory import CannotStart
from leasehold.local_stack.launcher import refuse_used_ports
from leasehold.local_stack.plan import StackPlan
from leasehold.local_stack.processes import Identity, identity, is_running, wait_until

UP = [sys.executable, "-m", "leasehold.cli", "up"]
PATIENCE_S = 60
STOP_S = 25  # more than all stages of the launcher may take together
SHARED = "documents"  # the xdist group of tests that share a stack
AN_EXPORT = {"subject": {"tenant": "acme", "route": "/v1/exports", "method": "POST"}}


def free_base_port() -> int:
    """Return a random base whose ports are all free now, so that test workers seldom collide."""
    while True:
        base = random.randrange(20_000, 32_000, 100)
        try:
            refuse_used_ports(StackPlan(Path(), base, wan=True).ports())
        except CannotStart:
            continue
        return base


class Launcher:
    """A running `leasehold up` that is ready."""

    def __init__(self, data: Path, *options: str) -> None:
        self.data = data
        self._errors = data.with_name(f"{data.name}.stderr")
        command = [*UP, "--data", str(data), "--port", str(free_base_port()), *options]
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
        assert wait_until(lambda: self._is_ready() or self.process.poll() is not None, PATIENCE_S)
        assert self._is_ready(), self.said()
        self.stack: dict[str, Any] = json.loads(self._stack_file.read_text())
        self.everybody = [who for who in map(identity, self.stack["pids"].values()) if who]

    @property
    def _stack_file(self) -> Path:
        return self.data / "stack.json"

    def _is_ready(self) -> bool:
        """Return whether stack.json is this launcher's, because a killed one leaves its file."""
        try:
            return bool(json.loads(self._stack_file.read_text())["pids"]["launcher"] == self.process.pid)
        except FileNotFoundError:
            return False

    def said(self) -> str:
        return self._errors.read_text()

    def ended(self, patience_s: float = PATIENCE_S) -> int:
        """Wait for its exit, check that no process is left, and return its status."""
        self.process.wait(patience_s)
        assert not self.left()
        return self.process.returncode

    def output(self) -> str:
        assert self.process.stdout
        return self.process.stdout.read().decode()

    def left(self) -> list[Identity]:
        return [who for who in self.everybody if is_running(who)]

    def check(self, region: str, cost: int = 1) -> HttpReply:
        return call("POST", f"{self.stack['agents'][region]}/v1/check", body=AN_EXPORT | {"cost": cost})

    def read(self, path: str) -> Any:
        token = self.stack["tokens"]["admin"]
        answer = call("GET", f"{self.stack['coordinator']}{path}", token=token)
        assert answer.status == 200, answer
        return answer.body

    def consumed(self) -> int:
        return sum(line["units"] for line in self.read("/v1/usage")["data"])


@contextmanager
def running(data: Path, *options: str) -> Iterator[Launcher]:
    launcher = Launcher(data, *options)
    try:
        yield launcher
    finally:
        launcher.process.kill()
        launcher.process.wait()
        assert launcher.process.stdout
        launcher.process.stdout.close()
