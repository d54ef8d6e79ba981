"""A FastAPI service that slowapi limits, as its documentation has it: `uvicorn slowapi_service:app`."""

import os

from fastapi import FastAPI, Request, Response
from slowapi import Limiter, _rate_limit_exceeded_handler
from slowapi.errors import RateLimitExceeded

limiter = Limiter(key_func=lambda: "acme", storage_uri=os.environ["STORE_URL"], headers_enabled=True)
app = FastAPI()
app.state.limiter = limiter
app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)


@app.get("/benchmark")
@limiter.limit("1000000/second")
async def asked(request: Request, response: Response) -> dict[str, str]:
    return {"export": "made"}
