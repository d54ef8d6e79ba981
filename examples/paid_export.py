"""A paid export: rows are held while it is made, and those that were written are billed, once.

    eval "$(./dev env)"
    LEASEHOLD_AGENT_URL=$AGENT_US_EAST uvicorn examples.paid_export:app --port 9000
    curl -i http://127.0.0.1:9000/v1/exports/orders -X POST -H 'X-Tenant: acme' -H 'Idempotency-Key: 17'

The caller's `Idempotency-Key` names the operation. A caller repeats a request whose response was lost, or that failed
half-way: it gets the same hold, and the same commit is booked once. Without a commit the hold expires, and nothing is
billed. A tenant whose allowance has fewer rows left than the export may need gets 429.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Header, HTTPException

from leasehold import AsyncClient
from leasehold.middleware import LimitMiddleware

MOST_ROWS = 40
REPORTS = {"orders": 25, "customers": 12}  # a report and its rows

# Exports are money: while the agent is away none is made.
client = AsyncClient(os.environ.get("LEASEHOLD_AGENT_URL", "http://127.0.0.1:8411"), on_failure="closed")


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with client:  # which closes its connections
        yield


app = FastAPI(lifespan=lifespan)
app.add_middleware(LimitMiddleware)  # answers Denied with 429, or with 503 while the agent is away


@app.post("/v1/exports/{report}")
async def make_export(report: str, x_tenant: str = Header(), idempotency_key: str = Header()) -> dict[str, object]:
    if report not in REPORTS:
        raise HTTPException(404, "no such report")
    subject = {"tenant": x_tenant, "route": "/v1/exports", "method": "POST"}
    operation_id = f"{report}:{idempotency_key}"
    held = await client.hold(subject, units=MOST_ROWS, ttl_ms=60_000, operation_id=operation_id)  # raises Denied
    rows = REPORTS[report]  # the work: its cost is known only now
    await client.commit(held, rows)
    return {"report": report, "rows": rows}
