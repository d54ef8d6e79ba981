"""The faults of docs/guides/health.md: how each is made and healed, and what services and logs must report."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.pieces import Piece
from tests.faults.scene import REGION, SMALL_LIMIT, Decision, Scene

Act = Callable[[Scene], object]


@dataclass(frozen=True)
class Fault:
    name: str
    title: str
    make: Act
    heal: Act
    agent: tuple[int | None, str]  # status of /readyz, and a code that is among the reasons
    check: tuple[int, str, str | None]  # status, problem type and reason
    coordinator: tuple[int | None, str] = (200, "")
    log: tuple[tuple[str, str], ...] = ()  # service, and how the line's event begins
    plan: str = "large"
    ask: Callable[[Scene], Decision] = field(default=Scene.check)
    is_fresh: bool = False  # starts with an empty store and a new agent, so that its tenant's lease is the only one
    is_quick: bool = False  # is part of a usual test run


# --- actions ----------------------------------------------------------------------------------------------------------


def nothing(scene: Scene) -> None:
    """Leave everything as it is."""


def kill_store(scene: Scene) -> None:
    scene.store.kill()


def start_store(scene: Scene) -> None:
    scene.store.begin()


def stop_process(piece: Piece) -> None:
    """Stop a process and, after it, its children."""
    for pid in _family(piece):
        os.kill(pid, signal.SIGSTOP)


def continue_process(piece: Piece) -> None:
    for pid in _family(piece):
        os.kill(pid, signal.SIGCONT)


def _family(piece: Piece) -> list[int]:
    assert piece.process is not None
    parent = piece.process.pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [parent, *map(int, children)]


def lose_the_journals_directory(scene: Scene) -> None:
    """Put a file in the place of the journal's directory, so that nothing can be written there, and kill the store."""
    journal = scene.directory / "journal"
    if journal.exists():
        journal.rename(scene.directory / "journal-away")
    journal.touch()
    kill_store(scene)


def bring_back_the_journals_directory(scene: Scene) -> None:
    journal, away = scene.directory / "journal", scene.directory / "journal-away"
    journal.unlink()
    if away.exists():
        away.rename(journal)
    start_store(scene)


def kill_coordinator_and_spend(scene: Scene) -> None:
    scene.coordinator.kill()
    scene.spend_all()


def start_coordinator(scene: Scene) -> None:
    scene.coordinator.begin()


def start_agent_alone(scene: Scene) -> None:
    scene.coordinator.kill()
    scene.restart(scene.agent)


def take_down_and_empty(scene: Scene) -> None:
    """Make the region need an epoch while it may not get one."""
    scene.set_region("down")
    scene.empty_store()


def replace_token(scene: Scene) -> None:
    scene.stack.replace_token(REGION)


def restart_agent(scene: Scene) -> None:
    scene.restart(scene.agent)


def start_postgres(scene: Scene) -> None:
    scene.postgres.begin()
    scene.postgres.wait()


def put_the_clock_ahead(seconds: float) -> Act:
    def act(scene: Scene) -> None:
        scene.coordinator.kill()
        scene.coordinator.process = scene.stack.start_coordinator_ahead(seconds)

    return act


def restart_coordinator(scene: Scene) -> None:
    scene.restart(scene.coordinator)


def terminate_agent(scene: Scene) -> None:
    assert scene.agent.process is not None
    scene.agent.process.send_signal(signal.SIGTERM)


def spend_the_limit(scene: Scene) -> None:
    scene.check(SMALL_LIMIT - 1)
    scene.spend_all()


def hold_the_rest(scene: Scene) -> None:
    scene.hold(SMALL_LIMIT - 1)  # one unit was spent before


READY = (200, "")
ADMITTED = (200, "", None)
NO_STORE = (503, "store-unavailable", "store")
OPENED = ("agent", "store circuit breaker opened")
NOT_READY = ("agent", "agent is not ready")
DEGRADED = ("agent", "agent is degraded")
DENIED = ("agent", "request denied")

FAULTS = [
    Fault(
        "limit", "the limit is reached", spend_the_limit, nothing, READY, (429, "quota-exceeded", "limit"),
        log=(DENIED,), plan="small", is_quick=True,
    ),
    Fault(
        "held", "the rest of the limit is only held (for 60 s)", hold_the_rest, nothing, READY,
        (429, "quota-exceeded", "limit"), log=(DENIED,), plan="small",
    ),
    Fault(
        "cost", "the cost is above the limit", nothing, nothing, READY, (429, "cost-above-limit", "never"),
        log=(DENIED,), plan="small", ask=lambda scene: scene.check(SMALL_LIMIT + 1), is_quick=True,
    ),
    Fault(
        "store-killed", "the store is killed", kill_store, start_store, (503, "store_unreachable"), NO_STORE,
        log=(("agent", "store connection failed"), OPENED, NOT_READY), is_quick=True,
    ),
    Fault(
        "store-hung", "the store hangs (SIGSTOP)", lambda scene: stop_process(scene.store),
        lambda scene: continue_process(scene.store), (503, "store_failing"), NO_STORE, log=(OPENED, NOT_READY),
        is_quick=True,
    ),
    Fault(
        "store-full", "the store is full (`maxmemory`)", lambda scene: scene.configure_store("maxmemory 1mb"),
        lambda scene: scene.configure_store("maxmemory 0"), (503, "store_failing"), NO_STORE,
        log=(OPENED, NOT_READY),
    ),
    Fault(
        "store-evicts", "the store's `maxmemory-policy` is `allkeys-lru`",
        lambda scene: scene.configure_store("maxmemory-policy allkeys-lru"),
        lambda scene: scene.configure_store("maxmemory-policy noeviction"), (503, "store_evicts"), NO_STORE,
        log=(("agent", "store may evict leases"), NOT_READY),
    ),
    Fault(
        "store-emptied", "the store lost its data (`FLUSHALL`)",
        Scene.empty_store, nothing, READY, ADMITTED,
        log=(("agent", "epoch closed"),), is_quick=True,
    ),
    Fault(
        "journal", "the store is killed, and the journal cannot be written", lose_the_journals_directory,
        bring_back_the_journals_directory, (503, "journal_failing"), NO_STORE,
        log=(OPENED, ("agent", "allowances fail closed"), NOT_READY),
        ask=lambda scene: scene.check(route="/v1/open-exports"),
    ),
    Fault(
        "coordinator-killed", "the coordinator is killed, leases last", lambda scene: scene.coordinator.kill(),
        start_coordinator, (200, "cut_off"), ADMITTED, (None, ""),
        log=(("agent", "exchange failed"), ("agent", "signal stream lost"), DEGRADED), is_fresh=True,
    ),
    Fault(
        "coordinator-hung", "the coordinator hangs (SIGSTOP), leases last",
        lambda scene: stop_process(scene.coordinator), lambda scene: continue_process(scene.coordinator),
        (200, "cut_off"), ADMITTED, (None, ""), log=(("agent", "exchange failed"), DEGRADED), is_fresh=True,
    ),
    Fault(
        "leases-spent", "the coordinator is killed, leases are spent", kill_coordinator_and_spend, start_coordinator,
        (503, "leases_exhausted"), (429, "cut-off", "cut_off"), (None, ""),
        log=(("agent", "exchange failed"), NOT_READY, DENIED), plan="small", is_fresh=True,
    ),
    Fault(
        "started-alone", "an agent starts while the coordinator is away", start_agent_alone, start_coordinator,
        (503, "cut_off"), (503, "not-ready", None), (None, ""), log=(NOT_READY,), is_fresh=True,
    ),
    Fault(
        "drained", "the region is drained", lambda scene: scene.set_region("draining"),
        lambda scene: scene.set_region("active"), (503, "region_drained"), (429, "region-drained", "drained"),
        log=(NOT_READY, DENIED), is_quick=True,
    ),
    Fault(
        "down", "the region's status is `down`, and its store lost its data", take_down_and_empty,
        lambda scene: scene.set_region("active"), (503, "region_down"), NO_STORE, log=(NOT_READY,),
    ),
    Fault(
        "token", "the region's token is revoked (for 10 s)", replace_token, restart_agent, (503, "exchanges_refused"),
        ADMITTED, log=(("agent", "exchange failed"), DEGRADED, NOT_READY), is_fresh=True,
    ),
    Fault(
        "clock-drifts", "the coordinator's clock is 2 s ahead", put_the_clock_ahead(2), restart_coordinator, READY,
        ADMITTED, (200, "clock_drifts"), log=(("coordinator", "coordinator degraded"),),
    ),
    Fault(
        "clock-differs", "the coordinator's clock is 60 s ahead", put_the_clock_ahead(60), restart_coordinator,
        (200, "cut_off"), ADMITTED, (503, "clock_differs"),
        log=(("coordinator", "coordinator not ready"), DEGRADED), is_fresh=True,
    ),
    Fault(
        "postgres-killed", "Postgres is killed", lambda scene: scene.postgres.kill(),
        start_postgres, (200, "cut_off"), ADMITTED,
        (503, "database_unavailable"), log=(("coordinator", "coordinator not ready"), DEGRADED), is_fresh=True,
    ),
    Fault(
        "postgres-hung", "Postgres hangs (SIGSTOP)", lambda scene: stop_process(scene.postgres),
        lambda scene: continue_process(scene.postgres), (200, "cut_off"), ADMITTED, (503, "database_unavailable"),
        log=(("coordinator", "coordinator not ready"), DEGRADED), is_fresh=True,
    ),
    Fault(
        "commits-hang", "commits wait for a synchronous standby that is not there",
        lambda scene: scene.alter_postgres("SET synchronous_standby_names = 'gone'"),
        lambda scene: scene.alter_postgres("RESET synchronous_standby_names"), (200, "cut_off"), ADMITTED,
        (503, "commits_fail"), log=(("coordinator", "coordinator not ready"), DEGRADED), is_fresh=True,
    ),
    Fault(
        "sigterm", "SIGTERM of the agent, in its lame duck period", terminate_agent, restart_agent,
        (503, "shutting_down"), ADMITTED, log=(("agent", "shutting down, reporting not ready"),),
    ),
]  # fmt: skip
