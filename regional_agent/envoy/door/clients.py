"""Who is connected to the gRPC door, for the agent's status."""

from typing import NamedTuple


class GrpcClient(NamedTuple):
    """A client that is connected."""

    address: str
    connected_s: float
    calls: int
    streams: int
