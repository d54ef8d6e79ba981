"""The faults that `./dev chaos --network` makes: how each is made and healed, and on which stack."""

import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.chaos.network.stack import STORE, TARGET, DividedStack, Equipment
from tests.chaos.network.wan import CUT, OPEN, Way
from tests.chaos.pieces import Piece

Act = Callable[[DividedStack], object]
BAD_WEATHER = Way(loss=0.3, delay_s=0.3)
PLAIN = Equipment()
WITH_STANDBY = Equipment(has_standby=True)
SMALL_DISKS = Equipment(has_small_disks=True)
SENTINEL = Equipment(store="sentinel")
CLUSTER = Equipment(store="cluster")
AGENT = "agent-us-east"
SPARE_BYTES = 4 << 20
CUT_OFF = "cut_off"


@dataclass(frozen=True)
class Fault:
    name: str
    title: str
    make: Act
    heal: Act
    equipment: Equipment = PLAIN
    is_of_all_regions: bool = False  # else the other region notices nothing
    is_quick: bool = False  # is part of a usual test run
    shows: str = ""  # a reason that some `/readyz` gives before the fault is healed


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


def killed(name: str, title: str, *, is_of_all_regions: bool = False) -> Fault:
    return Fault(f"{name}-killed", f"{title} is killed", kill(name), begin(name), PLAIN, is_of_all_regions)


def hung(name: str, title: str, *, is_of_all_regions: bool = False) -> Fault:
    hang, go_on = signal_process(signal.SIGSTOP, name), signal_process(signal.SIGCONT, name)
    return Fault(f"{name}-hung", f"{title} hangs (SIGSTOP)", hang, go_on, PLAIN, is_of_all_regions)


# --- Postgres ---------------------------------------------------------------------------------------------------------


def fail_over(stack: DividedStack, *, is_synchronous: bool) -> None:
    assert stack.pair is not None
    with stack.wan.inside("core"):
        stack.pair.wait_for_standby(is_synchronous)
    stack.fail_over()


def add_standby(stack: DividedStack) -> None:
    stack.add_standby(is_synchronous=True)


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
    """Give the store's process no more memory than it has, and let it ask for more until it ends."""
    process = stack.pieces[STORE].process
    assert process is not None
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + SPARE_BYTES
    resource.prlimit(process.pid, resource.RLIMIT_AS, (most, most))
    stack.fill_store(lambda: process.poll() is not None)


def kill_sentinels_primary(stack: DividedStack) -> None:
    assert stack.sentinels is not None
    with stack.wan.inside(TARGET):
        stack.sentinels.signal(stack.sentinels.primary(), signal.SIGKILL)


def kill_clusters_primary(stack: DividedStack) -> None:
    assert stack.cluster is not None
    stack.cluster.of_cell(0).kill()


FAULTS = (
    Fault("partition", "the region is cut off, both ways", shape(CUT, CUT), mend, is_quick=True, shows=CUT_OFF),
    Fault("requests-lost", "nothing that the region sends arrives", shape(CUT, OPEN), mend, shows=CUT_OFF),
    Fault(
        "replies-lost", "nothing that is sent to the region arrives", shape(OPEN, CUT), mend,
        is_quick=True, shows=CUT_OFF,
    ),
    Fault("bad-weather", "30 % of packets lost, 300 ms each way", shape(BAD_WEATHER, BAD_WEATHER), mend, is_quick=True),
    killed(AGENT, "one of two agents"),
    hung(AGENT, "one of two agents"),
    killed(STORE, "the store"),
    hung(STORE, "the store"),
    killed("coordinator", "the coordinator", is_of_all_regions=True),
    hung("coordinator", "the coordinator", is_of_all_regions=True),
    killed("postgres", "Postgres", is_of_all_regions=True),
    hung("postgres", "Postgres", is_of_all_regions=True),
    Fault("store-out-of-memory", "the store ends for want of memory", run_out_of_memory, begin(STORE)),
    Fault("store-disk-full", "the store's disk is full", fill(STORE), free_store, SMALL_DISKS),
    Fault(
        "journal-disk-full", "the store is killed, and the outage journal's disk is full",
        fill_journal_and_kill_store, free_journal_and_begin_store, SMALL_DISKS,
    ),
    Fault(
        "failover-synchronous", "Postgres fails over to its synchronous standby",
        partial(fail_over, is_synchronous=True), add_standby, WITH_STANDBY, is_of_all_regions=True,
    ),
    Fault(
        "failover-asynchronous", "Postgres fails over to an asynchronous standby that has every commit",
        partial(fail_over, is_synchronous=False), add_standby, WITH_STANDBY, is_of_all_regions=True,
    ),
    Fault(
        "standby-gone", "commits wait for a standby that is gone", lose_standby, add_standby, WITH_STANDBY,
        is_of_all_regions=True,
    ),
    Fault("sentinel", "Sentinel fails the store over", kill_sentinels_primary, nothing, SENTINEL),
    Fault("cluster", "a shard of the Cluster fails over", kill_clusters_primary, nothing, CLUSTER),
)  # fmt: skip
