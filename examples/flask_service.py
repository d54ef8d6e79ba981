"""A Flask service whose requests are checked before it sees them.

eval "$(./dev env)"
LEASEHOLD_AGENT_URL=$AGENT_US_EAST flask --app examples.flask_service run --port 9000
curl -i http://127.0.0.1:9000/v1/exports -X POST -H 'X-Tenant: acme'
"""

import os

from flask import Flask, Request, g

from leasehold import Client, Subject
from leasehold.middleware.flask import install_limits

client = Client(os.environ.get("LEASEHOLD_AGENT_URL", "http://127.0.0.1:8411"))


def subject_of(request: Request) -> Subject | None:
    """Return who makes a request, and for what. Health checks are not limited, and a report takes a slot by itself."""
    if request.path in ("/healthz", "/v1/reports"):
        return None
    return {"tenant": request.headers.get("X-Tenant", "anonymous"), "route": request.path, "method": request.method}


app = Flask(__name__)
install_limits(app, check=client.check, subject=subject_of)


@app.get("/healthz")
def read_health() -> str:
    return "healthy\n"


@app.post("/v1/exports")
def make_export() -> str:
    return f"{g.limit_decision.policies[0].remaining} exports left\n"


@app.post("/v1/reports")
@client.in_slot(lambda: {"tenant": "acme", "route": "/v1/reports", "method": "POST"})
def make_report() -> str:
    """Run as one of few at once. `Denied`, raised in its place, is answered with 429."""
    return "reported\n"
