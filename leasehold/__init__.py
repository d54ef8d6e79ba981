"""Leasehold: quotas over several regions, never sold twice and never booked twice.

`from leasehold import Client` is what most programs need. Each name is imported when it is used first, so that a
program loads no more than it needs. `Engine`, which decides in the program's own process, and the command line need
the server's packages: `pip install 'leasehold[server]'`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leasehold.client._async.client import AsyncClient as AsyncClient
    from leasehold.client._sync.client import Client as Client
    from leasehold.client.agent_protocol import AgentUnavailable as AgentUnavailable
    from leasehold.client.agent_protocol import Decision as Decision
    from leasehold.client.agent_protocol import Denied as Denied
    from leasehold.client.agent_protocol import Explanation as Explanation
    from leasehold.client.agent_protocol import RequestRejected as RequestRejected
    from leasehold.client.agent_protocol import Subject as Subject
    from leasehold.engine import Engine as Engine
    from protocol.circuit_breaker import CircuitBreaker as CircuitBreaker

_MODULES = {
    "AgentUnavailable": "leasehold.client.agent_protocol",
    "AsyncClient": "leasehold.client._async.client",
    "CircuitBreaker": "leasehold.client.agent_protocol",
    "Client": "leasehold.client._sync.client",
    "Decision": "leasehold.client.agent_protocol",
    "Denied": "leasehold.client.agent_protocol",
    "Engine": "leasehold.engine",
    "Explanation": "leasehold.client.agent_protocol",
    "RequestRejected": "leasehold.client.agent_protocol",
    "Subject": "leasehold.client.agent_protocol",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(__import__(_MODULES[name], fromlist=[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"leasehold.{name} needs {error.name}: pip install 'leasehold[server]'") from error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
