"""The name of every key in a region's store; lua/README.md is their glossary.

A key that belongs to a lane has the lane as its hash tag. In a Cluster the tag is the cell's number, which the cell's
fence has as well, so one script reaches all keys of a cell. A key that belongs to an epoch has the epoch in its name,
so an older epoch's usage stays readable beside the current one's.
"""

from protocol.identifiers import lane_of

FORMAT = OLDEST_FORMAT = 1  # of the keys and their content, which the fence has as well: see lua/README.md
FENCE = b"lh:fence"
EPOCHS = b"lh:epochs"
PROBE = b"lh:probe"
CONFIRMED = b"lh:confirmed"
LIBRARIES = b"lh:libraries"


def of_cell(name: bytes, cell: int | None) -> bytes:
    """Return the name of FENCE, EPOCHS, PROBE, CONFIRMED or LIBRARIES in a cell of a Cluster; None: in a store."""
    return name if cell is None else b"lh:{%d}:%s" % (cell, name.removeprefix(b"lh:"))


def lane(lane: int, epoch: int) -> bytes:
    return b"lh:{%d}:lane:%d" % (lane, epoch)


def dirty(lane: int, epoch: int) -> bytes:
    return b"lh:{%d}:to_report:%d" % (lane, epoch)


def lease(lane: int, epoch: int, quota: str) -> bytes:
    return b"lh:{%d}:lease:%d:%s" % (lane, epoch, quota.encode())


def usage_lines(lane: int, epoch: int, quota: str) -> bytes:
    return b"lh:{%d}:usage:%d:%s" % (lane, epoch, quota.encode())


def holds(lane: int, epoch: int, quota: str) -> bytes:
    return b"lh:{%d}:holds:%d:%s" % (lane, epoch, quota.encode())


def hold_deadlines(lane: int, epoch: int, quota: str) -> bytes:
    return b"lh:{%d}:hold_deadlines:%d:%s" % (lane, epoch, quota.encode())


def rate(lane: int, quota: str) -> bytes:
    return b"lh:{%d}:rate:%s" % (lane, quota.encode())


def demands(lane: int, quota: str) -> bytes:
    return b"lh:{%d}:demands:%s" % (lane, quota.encode())


def rate_log(lane: int, quota: str) -> bytes:
    return b"lh:{%d}:rate_log:%s" % (lane, quota.encode())


def slots(lane: int, quota: str) -> bytes:
    return b"lh:{%d}:slots:%s" % (lane, quota.encode())


def slot_deadlines(lane: int, quota: str) -> bytes:
    return b"lh:{%d}:slot_deadlines:%s" % (lane, quota.encode())


def slot_retention(lane: int, quota: str) -> bytes:
    return b"lh:{%d}:slot_retention:%s" % (lane, quota.encode())


def operation(lane: int, digest: str) -> bytes:
    return b"lh:{%d}:op:%s" % (lane, digest.encode())


# --- the keys that an algorithm takes ---------------------------------------------------------------------------------


def hash_tag(name: str, lanes: int, cell: int | None) -> int:
    """Return the hash tag of the keys that belong to a name: its lane, or in a Cluster the cell."""
    return lane_of(name, lanes) if cell is None else cell


def of_allowance(quota: str, lanes: int, epoch: int, cell: int | None) -> tuple[bytes, ...]:
    tag = hash_tag(quota, lanes, cell)
    return (
        lease(tag, epoch, quota),
        usage_lines(tag, epoch, quota),
        dirty(tag, epoch),
        holds(tag, epoch, quota),
        hold_deadlines(tag, epoch, quota),
    )


def of_slots(quota: str, lanes: int, cell: int | None) -> tuple[bytes, ...]:
    tag = hash_tag(quota, lanes, cell)
    return slots(tag, quota), slot_deadlines(tag, quota), slot_retention(tag, quota)
