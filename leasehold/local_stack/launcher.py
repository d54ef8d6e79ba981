"""`leasehold up`, from the first process to the last.

Everything is started at once, for Python takes as long to import a service as Postgres takes to answer; only
the making of a new cluster goes first, for all else has to wait for it. The coordinator and the agents then wait, with
everything imported, for a word on their standard input: the coordinator's is said when its schema is there, the agents'
when it knows their regions. So nobody has to ask twice.
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
from leasehold.local_stack.plan import COORDINATOR_URL_VARIABLE, DELAY_MS, REGIONS, URL_VARIABLE, Plan, Stack
from leasehold.local_stack.processes import spawn
from leasehold.local_stack.seed import seed

READY_S = 30
EMBEDDED_POSTGRES_ANSWERS_S = 15
REAL_POSTGRES_ANSWERS_S = 3
WATCH_S = 0.1
ASK_AGAIN_S = 0.03
DATABASE = "leasehold"
COORDINATOR = "coordinator"  # whom the coordinator logs in as


class Interrupted(Exception):
    """Somebody wants it to stop before it has begun."""


class Interruptions:
    """How often we were asked to end. Handlers only count: a process must never be started and then forgotten."""

    def __init__(self) -> None:
        self.count = 0

    def _another(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1

    def is_hurried(self) -> bool:
        return self.count > 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, self._another) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def up(plan: Plan, announce: Callable[[Stack], None], say: Callable[[str], None]) -> bool:
    """Run the stack until it is asked to end. True if it did end so; raises CannotStart if it never was ready."""
    interruptions = Interruptions()
    with interruptions.counted():
        directory = open_data_directory(plan.data)
        try:
            return _Launch(plan, directory, interruptions, say).run(announce)
        except (OSError, embedded.CannotRun) as error:
            raise CannotStart(str(error)) from error
        finally:
            directory.release()


class _Launch:
    def __init__(
        self, plan: Plan, directory: DataDirectory, interruptions: Interruptions, say: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._interruptions = interruptions
        self._say = say
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
            self._say(f"ended what a killed launcher had left running: {', '.join(left)}")
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
            PREPARE, _PREPARE, urls.preparations_settings(), self._directory.path, _patience_s(self._plan)
        )
        if self._plan.postgres is None:
            self._start_postgres(secrets.postgres)
        self._start_python("coordinator", _COORDINATOR, urls.coordinator_settings())
        for region in REGIONS:
            if (
                self._plan.wan
            ):  # a process for each, so that one region can be cut off: nothing goes through a stopped one
                self._start_python(
                    f"relay-{region}", _RELAY, {}, self._plan.coordinator_port, _route(self._plan, region)
                )
            state = {"LEASEHOLD_AGENT_STATE_DIR": str(self._directory.agent(region))}
            self._start_python(f"agent-{region}", _AGENT, urls.agent_settings(region) | state)
        return self._make_ready(secrets, urls)

    def _make_ready(self, secrets: Secrets, urls: "_Urls") -> Stack:
        self._wait_for(partial(self._children.has_done, PREPARE), lambda: "the database is not ready")
        self._children.tell("coordinator")
        self._wait_for_service("the coordinator", self._plan.coordinator_url)
        seed(self._plan.coordinator_url, secrets.tokens["admin"])
        for region in REGIONS:
            self._children.tell(f"agent-{region}")
        for region in REGIONS:
            self._wait_for_service(f"the agent of {region}", self._plan.agent_url(region))
        stack = {
            "coordinator": self._plan.coordinator_url,
            "agents": {region: self._plan.agent_url(region) for region in REGIONS},
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
        # -P: whatever lies in the directory from which somebody calls us is not part of the program.
        command = [sys.executable, "-P", *arguments, *map(str, more)]
        self._begin(name, lambda log: _spawn_python(command, log, settings))

    def _wait_for_service(self, name: str, url: str) -> None:
        self._wait_for(partial(is_ready, url), lambda: f"{name} is not ready: {why_not_ready(url)}")

    def _wait_for(self, condition: Callable[[], bool], complaint: Callable[[], str]) -> None:
        deadline = time.monotonic() + READY_S
        while not condition():
            if ended := self._children.ended():
                raise CannotStart(str(ended))
            self._refuse_if_interrupted()
            if time.monotonic() > deadline:
                raise CannotStart(f"after {READY_S} s {complaint()} (its log is in {self._directory.path / 'logs'})")
            time.sleep(ASK_AGAIN_S)

    # --- run and stop

    def _watch(self) -> bool:
        while not self._interruptions.count:
            if ended := self._children.ended():
                self._say(
                    "\n  ".join([f"{ended.name} {ended.how}, so everything ends; its last words:", *ended.last_words])
                )
                return False
            time.sleep(WATCH_S)
        return True

    def _stop(self) -> None:
        self._directory.stack_file.unlink(missing_ok=True)
        killed = self._children.stop(self._interruptions.is_hurried)
        self._directory.forget()
        if killed:
            self._say(f"had to be killed, for want of time: {', '.join(killed)}")


class _Urls:
    """What each process is told, through its environment; arguments are for everybody to see."""

    def __init__(self, plan: Plan, secrets: Secrets) -> None:
        self._plan = plan
        self._secrets = secrets
        self.postgres = plan.postgres or embedded.postgres_url(plan.postgres_port, secrets.postgres, DATABASE)
        # In somebody else's Postgres we make no users: there the coordinator comes as whoever the URL names.
        restricted = embedded.postgres_url(plan.postgres_port, secrets.coordinator, DATABASE, COORDINATOR)
        self.of_coordinator = plan.postgres or restricted

    def store(self, region: str) -> str:
        embedded_url = embedded.store_url(self._plan.store_port(region), self._secrets.stores[region])
        return self._plan.stores.get(region, embedded_url)

    def preparations_settings(self) -> dict[str, str]:
        told = {URL_VARIABLE: self.postgres}
        return told if self._plan.postgres else told | {COORDINATOR_URL_VARIABLE: self.of_coordinator}

    def coordinator_settings(self) -> dict[str, str]:
        settings = {"DATABASE_URL": self.of_coordinator, "HOST": embedded.LOOPBACK, "PORT": self._plan.coordinator_port}
        settings |= (
            {} if self._plan.postgres else {"INSTALLATION": "local stack"}
        )  # whose ports may be others next time
        return {f"LEASEHOLD_COORDINATOR_{name}": str(value) for name, value in settings.items()}

    def agent_settings(self, region: str) -> dict[str, str]:
        settings = {
            "REGION": region,
            "COORDINATOR_URL": self._plan.coordinator_url_for(region),
            "COORDINATOR_TOKEN": self._secrets.tokens[f"region:{region}"],
            "STORE_URL": self.store(region),
            "HOST": embedded.LOOPBACK,
            "PORT": self._plan.agent_port(region),
            "RETURN_ON_STOP": "true",
            "LAME_DUCK_MS": 0,  # no load balancer looks at /readyz here
        }
        patience = {} if _TIMEOUT in os.environ else {_TIMEOUT: DECISION_TIMEOUT_MS}
        return {f"LEASEHOLD_AGENT_{name}": str(value) for name, value in settings.items()} | patience


_TIMEOUT = "LEASEHOLD_AGENT_DECISION_TIMEOUT_MS"
DECISION_TIMEOUT_MS = "250"  # a dozen processes share the cores: a store that waits for its turn is not down
_PREPARE = ["-m", "leasehold.local_stack.prepare"]
_RELAY = ["-m", "leasehold.local_stack.relay"]
_SERVICE = "leasehold.local_stack.run_when_told"
_COORDINATOR = ["-m", _SERVICE, "coordinator"]
_AGENT = ["-m", _SERVICE, "agent"]


def _spawn_python(command: list[str], log: Path, settings: dict[str, str]) -> subprocess.Popen[bytes]:
    return spawn(command, log=log, environ={**os.environ, **settings}, waits=_SERVICE in command)


def _patience_s(plan: Plan) -> int:
    """A real Postgres is there or it is not; ours is being started."""
    return EMBEDDED_POSTGRES_ANSWERS_S if plan.postgres is None else REAL_POSTGRES_ANSWERS_S


def _route(plan: Plan, region: str) -> str:
    return f"{plan.relay_port(region)}:{DELAY_MS[region]}"


def refuse_used_ports(ports: Iterable[tuple[int, str]]) -> None:
    for port, purpose in ports:
        with socket.socket() as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as the servers do: what lingers is no obstacle
            try:
                probe.bind((embedded.LOOPBACK, port))
            except OSError as error:
                raise CannotStart(
                    f"port {port}, meant for {purpose}, cannot be used ({error.strerror}): choose others with --port"
                ) from error
