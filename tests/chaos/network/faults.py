"""The faults that `./dev chaos --network` makes: how each is made and healed, and on which stack."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from leasehold.local_stack.processes import wait_until
from tests.chaos.network.memory import bounded_memory
from tests.chaos.network.stack import STORE, TARGET, WAITING_LANES, DividedStack, Equipment
from tests.chaos.network.wan import CUT as CLOSED
from tests.chaos.network.wan import OPEN, Way
from tests.chaos.pieces import PATIENCE_S, THIS_RELEASE, Piece
from tests.parts import part

Act = Callable[[DividedStack], object]
BAD_WEATHER = Way(loss=0.3, delay_s=0.3)
PLAIN = Equipment()
WITH_STANDBY = Equipment(has_standby=True)
SMALL_DISKS = Equipment(has_small_disks=True)
SENTINEL = Equipment(store="sentinel")
CLUSTER = Equipment(store="cluster")
MOVABLE_CLOCK = Equipment(has_movable_clock=True)
TWO_COORDINATORS = Equipment(knows_two_coordinators=True)
AGENT = "agent-us-east"
SPARE_BYTES = 4 << 20
LOST_COMMITS = 20
CUT_OFF = ("cut_off", "leases_exhausted")  # by whether a lease is left


@dataclass(frozen=True)
class Fault:
    name: str
    title: str
    make: Act
    heal: Act
    equipment: Equipment = PLAIN
    is_of_all_regions: bool = False  # else the other region notices nothing
    is_quick: bool = False  # is part of a usual test run
    shows: Sequence[str] = ()  # reasons, of which some `/readyz` gives one before the fault is healed
    alert: str = ""  # fires before the fault is healed
    no_alert: str = ""  # why none has to fire


def nothing(stack: DividedStack) -> None:
    """Leave everything as it is."""


def shape(out: Way, back: Way) -> Act:
    return lambda stack: stack.wan.shape(TARGET, out=out, back=back)


mend = shape(OPEN, OPEN)


def signal_process(number: signal.Signals, name: str) -> Act:
    """Send a signal to a process and its children."""

    def act(stack: DividedStack) -> None:
        for pid in _family(stack.pieces[name]):
            os.kill(pid, number)

    return act


def _family(piece: Piece) -> list[int]:
    assert piece.process is not None
    parent = piece.process.pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [parent, *map(int, children)]


def kill(name: str) -> Act:
    return lambda stack: stack.pieces[name].kill()


def begin(name: str) -> Act:
    return lambda stack: stack.pieces[name].begin()


def killed(name: str, title: str, alert: str, *, is_of_all_regions: bool = False) -> Fault:
    return Fault(f"{name}-killed", f"{title} is killed", kill(name), begin(name), PLAIN, is_of_all_regions, alert=alert)


def hung(name: str, title: str, alert: str, *, is_of_all_regions: bool = False) -> Fault:
    hang, go_on = signal_process(signal.SIGSTOP, name), signal_process(signal.SIGCONT, name)
    return Fault(f"{name}-hung", f"{title} hangs (SIGSTOP)", hang, go_on, PLAIN, is_of_all_regions, alert=alert)


# --- Postgres ---------------------------------------------------------------------------------------------------------


def fail_over(stack: DividedStack, *, is_synchronous: bool) -> None:
    assert stack.pair is not None
    with stack.wan.inside("core"):
        stack.pair.wait_for_standby(is_synchronous)
    stack.fail_over()


def add_standby(stack: DividedStack) -> None:
    stack.add_standby(is_synchronous=True)


def lose_commits(stack: DividedStack) -> None:
    """Fail over to a standby that lacks the last commits: usage that regions have reported, and grants."""
    assert stack.pair is not None
    before = stack.count_commits()
    with stack.wan.inside("core"):
        stack.pair.leave_behind()
    assert wait_until(lambda: stack.count_commits() >= before + LOST_COMMITS, PATIENCE_S)
    stack.fail_over()


def rebase_lanes(stack: DividedStack) -> None:
    """Let two people approve how the lanes go on, as docs/guides/recovery.md says, and add a standby again."""
    assert wait_until(stack.rebase_lanes, PATIENCE_S), stack.read(WAITING_LANES)
    add_standby(stack)


def lose_standby(stack: DividedStack) -> None:
    assert stack.pair is not None
    stack.pair.standby.kill()


# --- stores, disks and memory -----------------------------------------------------------------------------------------


def fill(disk: str) -> Act:
    return lambda stack: stack.disks[disk].fill()


def free(disk: str) -> Act:
    return lambda stack: stack.disks[disk].free()


def free_store(stack: DividedStack) -> None:
    """Free the disk, and start the store again if it ended."""
    stack.disks[STORE].free()
    process = stack.pieces[STORE].process
    if process is not None and process.poll() is not None:
        stack.pieces[STORE].begin()


def fill_journal_and_kill_store(stack: DividedStack) -> None:
    stack.disks["journal"].fill()
    stack.pieces[STORE].kill()


def free_journal_and_begin_store(stack: DividedStack) -> None:
    stack.disks["journal"].free()
    stack.pieces[STORE].begin()


def run_out_of_memory(stack: DividedStack) -> None:
    """Give the store's process hardly more memory than it has, and let it ask for more until it ends."""
    process = stack.pieces[STORE].process
    assert process is not None
    with bounded_memory(process.pid, SPARE_BYTES):
        stack.fill_store(lambda: process.poll() is not None)
        process.wait(PATIENCE_S)


def move_clock(hours: int) -> Act:
    def act(stack: DividedStack) -> None:
        assert stack.clock is not None
        stack.clock.move(hours)
        assert wait_until(lambda: stack.hours_of_store == hours, PATIENCE_S), stack.hours_of_store

    return act


# --- releases ---------------------------------------------------------------------------------------------------------


def go_back(stack: DividedStack) -> None:
    roll(stack, part("release-before") / "venv" / "bin" / "python")


def upgrade(stack: DividedStack) -> None:
    roll(stack, THIS_RELEASE)


def roll(stack: DividedStack, python: Path) -> None:
    """Replace the coordinator and then the target's agents, one by one."""
    stack.start_coordinator(python)
    stack.keep_new_coordinator()
    for name in (AGENT, f"{AGENT}-2"):
        stack.replace_agent(name, python)


# --- primaries of stores ----------------------------------------------------------------------------------------------


def kill_sentinels_primary(stack: DividedStack) -> None:
    assert stack.sentinels is not None
    with stack.wan.inside(TARGET):
        stack.sentinels.signal(stack.sentinels.primary(), signal.SIGKILL)


def kill_clusters_primary(stack: DividedStack) -> None:
    assert stack.cluster is not None
    stack.cluster.of_cell(0).kill()


CUT = "LeaseholdRegionCutOff"
DENIED = "LeaseholdRequestsDenied"
AGENT_DOWN = "LeaseholdAgentDown"
NO_STORE = "LeaseholdStoreUnavailable"
NO_COORDINATOR = "LeaseholdNoCoordinatorReady"
OVER_SOON = "it is over before an alert waits"
FAULTS = (
    Fault(
        "partition", "the region is cut off, both ways", shape(CLOSED, CLOSED), mend,
        is_quick=True, shows=CUT_OFF, alert=CUT,
    ),
    Fault(
        "requests-lost", "nothing that the region sends arrives", shape(CLOSED, OPEN), mend, shows=CUT_OFF, alert=CUT
    ),
    Fault(
        "replies-lost", "nothing that is sent to the region arrives", shape(OPEN, CLOSED), mend,
        is_quick=True, shows=CUT_OFF, alert=CUT,
    ),
    Fault(
        "bad-weather", "30 % of packets lost, 300 ms each way", shape(BAD_WEATHER, BAD_WEATHER), mend,
        is_quick=True, alert=DENIED,
    ),
    killed(AGENT, "one of two agents", AGENT_DOWN),
    hung(AGENT, "one of two agents", AGENT_DOWN),
    killed(STORE, "the store", NO_STORE),
    hung(STORE, "the store", NO_STORE),
    killed("coordinator", "the coordinator", NO_COORDINATOR, is_of_all_regions=True),
    hung("coordinator", "the coordinator", NO_COORDINATOR, is_of_all_regions=True),
    killed("postgres", "Postgres", NO_COORDINATOR, is_of_all_regions=True),
    hung("postgres", "Postgres", NO_COORDINATOR, is_of_all_regions=True),
    Fault(
        "store-out-of-memory", "the store runs out of memory", run_out_of_memory, begin(STORE),
        alert=NO_STORE,
    ),
    Fault("store-disk-full", "the store's disk is full", fill(STORE), free_store, SMALL_DISKS, alert=NO_STORE),
    Fault(
        "journal-disk-full", "the store is killed, and the outage journal's disk is full",
        fill_journal_and_kill_store, free_journal_and_begin_store, SMALL_DISKS, alert="LeaseholdJournalFailing",
    ),
    Fault(
        "store-clock-ahead", "the store's clock jumps 3 h ahead, and then back", move_clock(3), move_clock(0),
        MOVABLE_CLOCK, no_alert="leases are renewed at once",
    ),
    Fault(
        "store-clock-behind", "the store's clock jumps 3 h back, and then ahead", move_clock(-3), move_clock(0),
        MOVABLE_CLOCK, no_alert="leases are renewed at once",
    ),
    Fault(
        "rolling-upgrade", "coordinator and agents go back to the release before, one by one, and are upgraded again",
        go_back, upgrade, TWO_COORDINATORS, no_alert="another process serves meanwhile",
    ),
    Fault(
        "failover-synchronous", "Postgres fails over to its synchronous standby",
        partial(fail_over, is_synchronous=True), add_standby, WITH_STANDBY, is_of_all_regions=True, no_alert=OVER_SOON,
    ),
    Fault(
        "failover-asynchronous", "Postgres fails over to an asynchronous standby that has every commit",
        partial(fail_over, is_synchronous=False), add_standby, WITH_STANDBY, is_of_all_regions=True, no_alert=OVER_SOON,
    ),
    Fault(
        "standby-gone", "commits wait for a standby that is gone", lose_standby, add_standby, WITH_STANDBY,
        is_of_all_regions=True, alert=NO_COORDINATOR,
    ),
    Fault(
        "commits-lost", "Postgres fails over to an asynchronous standby that lacks commits, and lanes are rebased",
        lose_commits, rebase_lanes, WITH_STANDBY,
        is_of_all_regions=True, shows=("lanes_stopped",), alert="LeaseholdLedgerLostData",
    ),
    Fault("sentinel", "Sentinel fails the store over", kill_sentinels_primary, nothing, SENTINEL, no_alert=OVER_SOON),
    Fault("cluster", "a shard of the Cluster fails over", kill_clusters_primary, nothing, CLUSTER, no_alert=OVER_SOON),
)  # fmt: skip
