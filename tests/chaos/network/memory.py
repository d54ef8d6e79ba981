"""Bound the memory of a process, as a container does: in a control group, the kernel kills what needs more.

Version 2 of control groups is used where its memory controller may be used, or else version 1. Where neither can be
had, the address space is bounded. Then the process is refused more, and ends itself.
"""

import os
import resource
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

CONTROL_GROUPS = Path("/sys/fs/cgroup")


class Version(NamedTuple):
    name: str
    roots: tuple[Path, ...]  # where it may be mounted
    bound: str  # the file with the most bytes
    swap: str  # the file in which 0 forbids it


VERSIONS = (
    Version(
        "a control group (version 2)", (CONTROL_GROUPS, CONTROL_GROUPS / "unified"), "memory.max", "memory.swap.max"
    ),
    Version("a control group (version 1)", (CONTROL_GROUPS / "memory",), "memory.limit_in_bytes", "memory.swappiness"),
)
ADDRESS_SPACE = "`RLIMIT_AS`"


@contextmanager
def bounded_memory(pid: int, spare_bytes: int) -> Iterator[None]:
    """Let a process take so many bytes more, and then run out of memory. It has to be gone at the end of the block."""
    with _group() as found:
        if found is None:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
            most = pages * os.sysconf("SC_PAGE_SIZE") + spare_bytes
            resource.prlimit(pid, resource.RLIMIT_AS, (most, most))
        else:
            version, group = found
            (group / version.bound).write_text(str(spare_bytes))  # what the process has stays with its former group
            with suppress(OSError):  # there may be no swap
                (group / version.swap).write_text("0")
            (group / "cgroup.procs").write_text(str(pid))
        yield


def kind_of_bound() -> str:
    """Return by what `bounded_memory` bounds memory on this machine."""
    with _group() as found:
        return ADDRESS_SPACE if found is None else found[0].name


@contextmanager
def _group() -> Iterator[tuple[Version, Path] | None]:
    """Make an empty control group that can bound memory, or yield None where that is not possible."""
    for version in VERSIONS:
        for root in version.roots:
            group = root / f"leasehold-{secrets.token_hex(4)}"
            try:
                group.mkdir()
            except OSError:  # not mounted, or read-only
                continue
            try:
                if _can_bound(root, group / version.bound):
                    yield version, group
                    return
            finally:
                group.rmdir()
    yield None


def _can_bound(root: Path, bound: Path) -> bool:
    if not bound.exists():
        with suppress(OSError):  # the controller is not there, or not given to us
            (root / "cgroup.subtree_control").write_text("+memory")
    return bound.exists()
