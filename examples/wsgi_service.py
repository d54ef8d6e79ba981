"""A WSGI service whose requests are checked before it sees them.

eval "$(./dev env)"
LEASEHOLD_AGENT_URL=$AGENT_US_EAST python examples/wsgi_service.py 9000
curl -i http://127.0.0.1:9000/v1/exports -X POST -H 'X-Tenant: acme'
"""

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import make_server

from leasehold import Client, Decision, Subject
from leasehold.middleware.wsgi import WsgiLimitMiddleware

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

client = Client(os.environ.get("LEASEHOLD_AGENT_URL", "http://127.0.0.1:8411"))


def subject_of(environ: dict[str, Any]) -> Subject | None:
    """Return who makes a request, and for what. Health checks are not limited."""
    if environ["PATH_INFO"] == "/healthz":
        return None
    tenant = environ.get("HTTP_X_TENANT", "anonymous")
    return {"tenant": tenant, "route": environ["PATH_INFO"], "method": environ["REQUEST_METHOD"]}


def service(environ: dict[str, Any], start_response: "StartResponse") -> Iterable[bytes]:
    decision: Decision | None = environ.get("leasehold.limit_decision")
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"healthy\n" if decision is None else f"{decision.policies[0].remaining} exports left\n".encode()]


application = WsgiLimitMiddleware(service, check=client.check, subject=subject_of)

if __name__ == "__main__":
    with make_server("127.0.0.1", int(sys.argv[1]), application) as server:
        server.serve_forever()
