"""Which releases work together, and how a process states its own.

A release works with the one before it, in both directions and in every pair of processes. So each release names the
oldest one that it works with, and the newer side of a connection refuses an older one by name: the older side cannot
know what came after it.

Agents state their release, their name and their capabilities in the headers of each call, and the coordinator answers
with its own. A process without these headers is of no known release, and is accepted.

A *capability* is behaviour that one side uses only if the other has stated it. An optional field needs none: a reader
ignores it. Behaviour that an older reader must not ignore needs one: see CONTRIBUTING.md.
"""

import functools
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

RELEASE = "0.2.0.dev0"
OLDEST_PEER = "0.1"  # the oldest minor release that this one works with
UPGRADE_ORDER = "the schema, the coordinators, the agents, the clients"
GUIDE = "docs/guides/upgrading.md"

RELEASE_HEADER = "leasehold-release"
CAPABILITIES_HEADER = "leasehold-capabilities"
AGENT_HEADER = "leasehold-agent"

MAX_CAPABILITIES = 64
_RELEASE = re.compile(r"(\d{1,4})\.(\d{1,4})(\.[0-9a-z.+]{1,24})?", re.ASCII)
_NAME = re.compile(r"[ -~]{1,128}", re.ASCII)
_CAPABILITY = re.compile(r"[a-z][a-z0-9_]{0,31}", re.ASCII)


class Capability(StrEnum):
    """Behaviour that one release has and another one may lack."""

    REQUIREMENTS = "requirements"  # a reader of policies sets items aside whose `requires` names what it does not know


CAPABILITIES = frozenset(each.value for each in Capability)


class Peer(NamedTuple):
    """The release and capabilities that the other side of a connection has stated."""

    release: str
    capabilities: frozenset[str] = frozenset()
    name: str = ""


class IncompatibleRelease(Exception):
    """The other side of a connection is too old. The message names both releases and the order of an upgrade."""


def stated(name: str = "") -> dict[str, str]:
    """Return the headers in which this process states its release."""
    headers = {RELEASE_HEADER: RELEASE, CAPABILITIES_HEADER: ",".join(sorted(CAPABILITIES))}
    return headers | ({AGENT_HEADER: name} if _NAME.fullmatch(name) else {})


def peer_of(headers: Mapping[str, str]) -> Peer | None:
    """Return what the headers of a message state, or None without a well-formed release."""
    release = headers.get(RELEASE_HEADER)
    if release is None:
        return None
    return _peer(release, headers.get(CAPABILITIES_HEADER, ""), headers.get(AGENT_HEADER, ""))


@functools.lru_cache(maxsize=1000)
def _peer(release: str, capabilities: str, name: str) -> Peer | None:
    if not _RELEASE.fullmatch(release):
        return None
    names = [each for each in capabilities.split(",")[:MAX_CAPABILITIES] if _CAPABILITY.fullmatch(each)]
    return Peer(release, frozenset(names), name if _NAME.fullmatch(name) else "")


def is_too_old(release: str) -> bool:
    """Return whether this release no longer works with another one."""
    return minor_of(release) < minor_of(OLDEST_PEER)


def minor_of(release: str) -> tuple[int, int]:
    """Return the major and minor number of a release. Raise ValueError if it is none."""
    found = _RELEASE.fullmatch(release)
    if found is None:
        raise ValueError(f"{release!r} is not a release such as {RELEASE}")
    return int(found[1]), int(found[2])


def too_old(older: str, release: str, newer: str) -> str:
    """Return why two processes do not work together, such as `This agent` and `the coordinator`."""
    return (
        f"{newer} is of release {RELEASE}, which works with release {OLDEST_PEER} and newer, and {older} is of release "
        f"{release}. Upgrade one minor release at a time, in this order: {UPGRADE_ORDER} ({GUIDE})."
    )
