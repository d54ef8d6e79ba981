"""The TLS contexts of an agent: of its own doors, of the coordinator's connections, and the store's certificate."""

from typing import NamedTuple

from prometheus_client import CollectorRegistry

from regional_agent.settings import AgentSettings
from web.tls.certificates import Certificates
from web.tls.context import ReloadedContext, TlsFiles, client_context
from web.tls.handshakes import FailedHandshakes, serving_context


class AgentTls(NamedTuple):
    http: ReloadedContext | None
    grpc: ReloadedContext | None  # of the same files
    coordinator: ReloadedContext | None
    certificates: Certificates


def tls_of(settings: AgentSettings, registry: CollectorRegistry) -> AgentTls:
    handshakes = FailedHandshakes(registry)
    http, grpc = (
        serving_context(
            settings.server_files(),
            requires_client_certificate=settings.tls_require_client_cert,
            handshakes=handshakes,
            protocols=protocols,
        )
        for protocols in ((), ("h2",))
    )
    coordinator = _client(settings.coordinator_files()) if settings.has_coordinator_tls else None
    store = settings.store_files()  # redis-py reads these at each connection: here they are only watched
    contexts = {"http": http, "coordinator": coordinator, "store": _client(store) if store.cert_file else None}
    return AgentTls(http, grpc, coordinator, Certificates(contexts, registry))


def _client(files: TlsFiles) -> ReloadedContext:
    return ReloadedContext(files, client_context)
