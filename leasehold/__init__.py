"""Leasehold: quotas over regions, never sold twice and never booked twice.

`from leasehold import Client` is what most programs need. It is loaded when it is asked for: the command line starts
quicker without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leasehold.client import AgentUnavailable as AgentUnavailable
    from leasehold.client import AsyncClient as AsyncClient
    from leasehold.client import CircuitBreaker as CircuitBreaker
    from leasehold.client import Client as Client
    from leasehold.client import Decision as Decision
    from leasehold.client import Denied as Denied
    from leasehold.client import Refused as Refused

__all__ = ["AgentUnavailable", "AsyncClient", "CircuitBreaker", "Client", "Decision", "Denied", "Refused"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from leasehold import client  # noqa: PLC0415 - see above

    return getattr(client, name)
