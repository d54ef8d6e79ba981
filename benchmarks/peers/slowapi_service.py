"""The same FastAPI service limited by slowapi, as its documentation shows it: `uvicorn slowapi_service:app`."""

import os

from fastapi import FastAPI, Request, Response
from slowapi import Limiter, _rate_limit_exceeded_handler
from slowapi.errors import RateLimitExceeded


def tenant_of(request: Request) -> str:
    return request.query_params["tenant"]


limiter = Limiter(key_func=tenant_of, storage_uri=os.environ["STORE_URL"], headers_enabled=True)
app = FastAPI()
app.state.limiter = limiter
app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)


@app.get("/benchmark")
@limiter.limit(f"{os.environ['PER_MINUTE']}/minute")
async def benchmark(request: Request, response: Response) -> dict[str, str]:
    return {"export": "made"}
