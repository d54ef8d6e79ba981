"""`leasehold up`, from the first process to the last.

Everything is started at once, because Python takes as long to import a service as Postgres takes to answer. Only a new
cluster is made first, because everything else waits for it. The coordinator and the agents import everything and then
wait for a line on their standard input: the coordinator gets it when its schema is ready, and the agents when the
coordinator knows their regions. So no service has to retry.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from leasehold.local_stack import embedded
from leasehold.local_stack.calls import is_ready, why_not_ready
from leasehold.local_stack.children import PREPARE, Children, end_left_running
from leasehold.local_stack.data_directory import (
    CannotStart,
    DataDirectory,
    Secrets,
    open_data_directory,
    write_private,
)
from leasehold.local_stack.plan import COORDINATOR_URL_VARIABLE, DELAY_MS, REGIONS, URL_VARIABLE, Stack, StackPlan
from leasehold.local_stack.processes import spawn
from leasehold.local_stack.seed import seed

READY_S = 30
EMBEDDED_POSTGRES_TIMEOUT_S = 15
EXISTING_POSTGRES_TIMEOUT_S = 3
WATCH_S = 0.1
POLL_S = 0.03
DATABASE = "leasehold"
COORDINATOR = "coordinator"  # the coordinator's Postgres user


class Interrupted(Exception):
    """The stack was interrupted before it was ready."""


class Interruptions:
    """Count signals to stop. Handlers only count, so that no process is started and then forgotten."""

    def __init__(self) -> None:
        self.count = 0

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1

    def is_impatient(self) -> bool:
        return self.count > 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, self._on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def up(plan: StackPlan, announce: Callable[[Stack], None], warn: Callable[[str], None]) -> bool:
    """Run the stack until it is interrupted. Return False if a process exited, or raise CannotStart."""
    interruptions = Interruptions()
    with interruptions.counted():
        directory = open_data_directory(plan.data)
        try:
            return _Launcher(plan, directory, interruptions, warn).run(announce)
        except (OSError, embedded.CannotRun) as error:
            raise CannotStart(str(error)) from error
        finally:
            directory.release()


class _Launcher:
    def __init__(
        self, plan: StackPlan, directory: DataDirectory, interruptions: Interruptions, warn: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._interruptions = interruptions
        self._warn = warn
        self._children = Children(directory)

    def run(self, announce: Callable[[Stack], None]) -> bool:
        secrets = self._open()
        try:
            stack = self._start(secrets)
            announce(stack)
            return self._watch()
        except Interrupted:
            return True
        finally:
            self._stop()

    # --- before anything runs

    def _open(self) -> Secrets:
        left = end_left_running(self._directory)
        if left:
            self._warn(f"stopped what a killed launcher had left running: {', '.join(left)}")
        if self._plan.fresh:
            self._directory.empty()
        self._directory.prepare()
        refuse_used_ports(self._plan.ports())
        return self._directory.secrets()

    # --- start

    def _start(self, secrets: Secrets) -> Stack:
        urls = _Urls(self._plan, secrets)
        for region in self._plan.embedded_stores():
            self._start_store(region, secrets.stores[region])
        self._start_python(
            PREPARE, _PREPARE, urls.preparation_settings(), self._directory.path, _postgres_timeout_s(self._plan)
        )
        if self._plan.postgres is None:
            self._start_postgres(secrets.postgres)
        self._start_python("coordinator", _COORDINATOR, urls.coordinator_settings())
        for region in REGIONS:
            if self._plan.wan:  # a process for each region, so that one region can be cut off by stopping its relay
                self._start_python(
                    f"relay-{region}", _RELAY, {}, self._plan.coordinator_port, _route(self._plan, region)
                )
            state = {"LEASEHOLD_AGENT_STATE_DIR": str(self._directory.agent(region))}
            self._start_python(f"agent-{region}", _AGENT, urls.agent_settings(region) | state)
        return self._make_ready(secrets, urls)

    def _make_ready(self, secrets: Secrets, urls: "_Urls") -> Stack:
        self._wait_for(partial(self._children.has_succeeded, PREPARE), lambda: "the database is not ready")
        self._children.start_deferred("coordinator")
        self._wait_for_service("the coordinator", self._plan.coordinator_url)
        seed(self._plan.coordinator_url, secrets.tokens["admin"])
        for region in REGIONS:
            self._children.start_deferred(f"agent-{region}")
        for region in REGIONS:
            self._wait_for_service(f"the agent of {region}", self._plan.agent_url(region))
        stack = {
            "coordinator": self._plan.coordinator_url,
            "agents": {region: self._plan.agent_url(region) for region in REGIONS},
            "grpc": {region: f"{embedded.LOOPBACK}:{self._plan.grpc_port(region)}" for region in REGIONS},
            "tokens": secrets.tokens,
            "postgres": urls.postgres,
            "stores": {region: urls.store(region) for region in REGIONS},
            "pids": {"launcher": os.getpid(), **self._children.pids()},
        }
        write_private(self._directory.stack_file, stack)
        return stack

    def _begin(self, name: str, start: Callable[[Path], subprocess.Popen[bytes]]) -> None:
        self._refuse_if_interrupted()
        self._children.add(name, start)

    def _refuse_if_interrupted(self) -> None:
        if self._interruptions.count:
            raise Interrupted

    def _start_store(self, region: str, password: str) -> None:
        data, port = self._directory.store(region), self._plan.store_port(region)
        self._begin(f"store-{region}", lambda log: embedded.start_store(data, port, password, log=log))

    def _start_postgres(self, password: str) -> None:
        self._refuse_if_interrupted()
        data = self._directory.postgres
        if not data.exists():
            unfinished = data.with_name("postgres.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            embedded.initialise_postgres(unfinished, password)
            unfinished.rename(data)
        port = self._plan.postgres_port
        self._begin("postgres", lambda log: embedded.start_postgres(data, port, log=log))

    def _start_python(self, name: str, arguments: list[str], settings: dict[str, str], *more: object) -> None:
        # -P: modules in the current directory are not part of the program.
        command = [sys.executable, "-P", *arguments, *map(str, more)]
        self._begin(name, lambda log: _spawn_python(command, log, settings))

    def _wait_for_service(self, name: str, url: str) -> None:
        self._wait_for(partial(is_ready, url), lambda: f"{name} is not ready: {why_not_ready(url)}")

    def _wait_for(self, condition: Callable[[], bool], reason: Callable[[], str]) -> None:
        deadline = time.monotonic() + READY_S
        while not condition():
            if exited := self._children.exited():
                raise CannotStart(str(exited))
            self._refuse_if_interrupted()
            if time.monotonic() > deadline:
                raise CannotStart(f"after {READY_S} s {reason()} (its log is in {self._directory.path / 'logs'})")
            time.sleep(POLL_S)

    # --- run and stop

    def _watch(self) -> bool:
        while not self._interruptions.count:
            if exited := self._children.exited():
                self._warn(
                    "\n  ".join(
                        [
                            f"{exited.name} {exited.how}, so everything is stopped; the end of its log:",
                            *exited.last_lines,
                        ]
                    )
                )
                return False
            time.sleep(WATCH_S)
        return True

    def _stop(self) -> None:
        self._directory.stack_file.unlink(missing_ok=True)
        killed = self._children.stop(self._interruptions.is_impatient)
        self._directory.forget()
        if killed:
            self._warn(f"killed, because they did not stop in time: {', '.join(killed)}")


class _Urls:
    """The settings of each process, passed in its environment: other users could see arguments."""

    def __init__(self, plan: StackPlan, secrets: Secrets) -> None:
        self._plan = plan
        self._secrets = secrets
        self.postgres = plan.postgres or embedded.postgres_url(plan.postgres_port, secrets.postgres, DATABASE)
        # In an existing Postgres no users are created: the coordinator logs in as the user of the URL.
        restricted = embedded.postgres_url(plan.postgres_port, secrets.coordinator, DATABASE, COORDINATOR)
        self.postgres_of_coordinator = plan.postgres or restricted

    def store(self, region: str) -> str:
        embedded_url = embedded.store_url(self._plan.store_port(region), self._secrets.stores[region])
        return self._plan.stores.get(region, embedded_url)

    def preparation_settings(self) -> dict[str, str]:
        settings = {URL_VARIABLE: self.postgres}
        return settings if self._plan.postgres else settings | {COORDINATOR_URL_VARIABLE: self.postgres_of_coordinator}

    def coordinator_settings(self) -> dict[str, str]:
        settings = {
            "DATABASE_URL": self.postgres_of_coordinator,
            "HOST": embedded.LOOPBACK,
            "PORT": self._plan.coordinator_port,
        }
        if not self._plan.postgres:
            settings["INSTALLATION"] = "local stack"  # its address may be another one next time
        return {f"LEASEHOLD_COORDINATOR_{name}": str(value) for name, value in settings.items()}

    def agent_settings(self, region: str) -> dict[str, str]:
        settings = {
            "REGION": region,
            "COORDINATOR_URL": self._plan.coordinator_url_for(region),
            "COORDINATOR_TOKEN": self._secrets.tokens[f"region:{region}"],
            "STORE_URL": self.store(region),
            "HOST": embedded.LOOPBACK,
            "PORT": self._plan.agent_port(region),
            "GRPC_PORT": self._plan.grpc_port(region),
            "RETURN_ON_STOP": "true",
            "LAME_DUCK_MS": 0,  # no load balancer looks at /readyz here
        }
        timeout = {} if _TIMEOUT in os.environ else {_TIMEOUT: DECISION_TIMEOUT_MS}
        return {f"LEASEHOLD_AGENT_{name}": str(value) for name, value in settings.items()} | timeout


_TIMEOUT = "LEASEHOLD_AGENT_DECISION_TIMEOUT_MS"
DECISION_TIMEOUT_MS = "250"  # a dozen processes share the cores: a store that waits for a core is not down
_PREPARE = ["-m", "leasehold.local_stack.prepare"]
_RELAY = ["-m", "leasehold.local_stack.relay"]
_SERVICE = "leasehold.local_stack.deferred_start"
_COORDINATOR = ["-m", _SERVICE, "coordinator"]
_AGENT = ["-m", _SERVICE, "agent"]


def _spawn_python(command: list[str], log: Path, settings: dict[str, str]) -> subprocess.Popen[bytes]:
    return spawn(command, log=log, environ={**os.environ, **settings}, waits=_SERVICE in command)


def _postgres_timeout_s(plan: StackPlan) -> int:
    """Return how long Postgres may take to answer: an existing one is up already, ours is being started."""
    return EMBEDDED_POSTGRES_TIMEOUT_S if plan.postgres is None else EXISTING_POSTGRES_TIMEOUT_S


def _route(plan: StackPlan, region: str) -> str:
    return f"{plan.relay_port(region)}:{DELAY_MS[region]}"


def refuse_used_ports(ports: Iterable[tuple[int, str]]) -> None:
    for port, purpose in ports:
        with socket.socket() as probe:
            # As the servers do: a lingering connection is no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((embedded.LOOPBACK, port))
            except OSError as error:
                raise CannotStart(
                    f"port {port}, meant for {purpose}, cannot be used ({error.strerror}): choose others with --port"
                ) from error
