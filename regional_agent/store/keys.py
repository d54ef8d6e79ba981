"""Every name that Leasehold uses in a region's store. lua/README.md says what stands behind each.

A key that belongs to a lane carries the lane as its hash tag. In a Cluster the tag is the cell's, which its fence
carries as well, so that one script can reach all of a cell. A key that belongs to an epoch carries the epoch in its
name, so that the evidence of an older one stays readable beside the current.
"""

FENCE = b"lh:fence"
EPOCHS = b"lh:epochs"
PROBE = b"lh:probe"


def of_cell(name: bytes, cell: int | None) -> bytes:
    """One of the three above, in a Cluster each cell's own. None: the store is single."""
    return name if cell is None else b"lh:{%d}:%s" % (cell, name.removeprefix(b"lh:"))


def lane(lane: int, epoch: int) -> bytes:
    return b"lh:{%d}:lane:%d" % (lane, epoch)


def dirty(lane: int, epoch: int) -> bytes:
    return b"lh:{%d}:dirty:%d" % (lane, epoch)


def lease(lane: int, epoch: int, quota: str) -> bytes:
    return b"lh:{%d}:lease:%d:%s" % (lane, epoch, quota.encode())


def lines(lane: int, epoch: int, quota: str) -> bytes:
    return b"lh:{%d}:lines:%d:%s" % (lane, epoch, quota.encode())


def holds(lane: int, epoch: int, quota: str) -> bytes:
    return b"lh:{%d}:holds:%d:%s" % (lane, epoch, quota.encode())


def due(lane: int, epoch: int, quota: str) -> bytes:
    return b"lh:{%d}:due:%d:%s" % (lane, epoch, quota.encode())


def rate(lane: int, quota: str) -> bytes:
    return b"lh:{%d}:rate:%s" % (lane, quota.encode())


def demands(lane: int, quota: str) -> bytes:
    return b"lh:{%d}:demands:%s" % (lane, quota.encode())


def log(lane: int, quota: str) -> bytes:
    return b"lh:{%d}:log:%s" % (lane, quota.encode())


def slots(lane: int, quota: str) -> bytes:
    return b"lh:{%d}:slots:%s" % (lane, quota.encode())


def slots_due(lane: int, quota: str) -> bytes:
    return b"lh:{%d}:slots_due:%s" % (lane, quota.encode())


def slots_over(lane: int, quota: str) -> bytes:
    return b"lh:{%d}:slots_over:%s" % (lane, quota.encode())


def operation(lane: int, digest: str) -> bytes:
    return b"lh:{%d}:op:%s" % (lane, digest.encode())
