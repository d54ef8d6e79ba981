"""Who is connected to the gRPC door, and what proxies may admit: at one process, and at all workers of an agent."""

from collections.abc import Sequence
from operator import attrgetter

from msgspec import Struct

from protocol.units import Units
from regional_agent.agent import RegionalAgent
from regional_agent.envoy.quota.status import QuotaStatus, quota_status

MOST_CLIENTS = 100


class GrpcClientStatus(Struct, frozen=True, kw_only=True):
    """A client that is connected to the gRPC door."""

    address: str
    connected_ms: Units
    calls: Units  # since it connected
    streams: Units  # calls under way


class DoorStatus(Struct, frozen=True, kw_only=True):
    """The gRPC door of one process, or of all workers that answered."""

    clients: list[GrpcClientStatus]  # those with most calls first
    more_clients: Units
    proxy_quotas: QuotaStatus | None  # null without a gRPC door
    silent_workers: Units = 0  # workers that did not answer


def door_status(region: RegionalAgent) -> DoorStatus:
    """Return the status of this process."""
    clients = sorted(region.grpc_clients(), key=attrgetter("calls"), reverse=True)
    service = region.proxy_quotas
    now_ms = region.cells[0].share_loop.now_ms()
    return DoorStatus(
        clients=[
            GrpcClientStatus(
                address=each.address, connected_ms=int(each.connected_s * 1000), calls=each.calls, streams=each.streams
            )
            for each in clients[:MOST_CLIENTS]
        ],
        more_clients=max(0, len(clients) - MOST_CLIENTS),
        proxy_quotas=None if service is None else quota_status(service, region.settings.name, now_ms),
    )


def merge_doors(doors: Sequence[DoorStatus], workers: int) -> DoorStatus:
    """Return what the workers that answered have together. Each of them has bounded its part."""
    quotas = [each.proxy_quotas for each in doors if each.proxy_quotas is not None]
    return DoorStatus(
        clients=sorted((client for each in doors for client in each.clients), key=attrgetter("calls"), reverse=True),
        more_clients=sum(each.more_clients for each in doors),
        proxy_quotas=_merge_quotas(quotas) if quotas else None,
        silent_workers=workers - len(doors),
    )


def _merge_quotas(quotas: Sequence[QuotaStatus]) -> QuotaStatus:
    return QuotaStatus(
        proxies=[proxy for each in quotas for proxy in each.proxies],
        assignments=[assignment for each in quotas for assignment in each.assignments],
        more_assignments=sum(each.more_assignments for each in quotas),
        rates=[rate for each in quotas for rate in each.rates],
    )
