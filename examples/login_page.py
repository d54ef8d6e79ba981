"""A log-in page that locks a user out after too many wrong passwords, and support that unlocks the user.

Each attempt takes a unit of the rate `logins`, before the password is compared. A right password gives it back, so only
wrong ones count, however many are tried at the same moment. Support resets the user's key, in all regions.

    eval "$(./dev env)"
    uvicorn examples.login_page:app --port 9000
    curl -i http://127.0.0.1:9000/v1/login -d user=jane -d password=wrong
    curl -i -X POST http://127.0.0.1:9000/support/unlock/jane

The quota `logins` is in the limits of `./dev up`: 15 an hour, which the regions share. The command line can unlock as
well: `leasehold reset create logins --for user=jane --reason "called, and was verified"`.
"""

import hmac
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qs

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

from leasehold import AsyncClient

PASSWORDS = {"jane": "correct horse"}  # a real page has salted hashes, in a database

client = AsyncClient(os.environ.get("LEASEHOLD_AGENT", "http://127.0.0.1:8411"))
coordinator = httpx.AsyncClient(
    base_url=os.environ.get("LEASEHOLD_URL", "http://127.0.0.1:8400"),
    headers={"Authorization": f"Bearer {os.environ.get('LEASEHOLD_TOKEN', '')}"},
    timeout=10,
)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with client, coordinator:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/v1/login")
async def log_in(request: Request) -> Response:
    form = parse_qs((await request.body()).decode())
    user, password = (form.get(name, [""])[0] for name in ("user", "password"))
    subject = {"user": user or "anonymous", "route": "/v1/login", "method": "POST"}
    attempt = await client.check(subject)
    if not attempt.allowed:
        return PlainTextResponse("Too many wrong passwords. Try again later, or call support.", 429, attempt.headers)
    if user not in PASSWORDS or not hmac.compare_digest(PASSWORDS[user].encode(), password.encode()):
        return PlainTextResponse("The user or the password is wrong.", 401)
    await client.check(subject, mode="refund")
    return PlainTextResponse(f"Welcome, {user}.")


@app.post("/support/unlock/{user}")
async def unlock(user: str) -> Response:
    """Forget the wrong passwords of a user. A real page lets support in here, and no one else."""
    reset = {"quota": "logins", "subject": {"user": user}, "reason": "called, and was verified"}
    (await coordinator.post("/v1/resets", json=reset)).raise_for_status()
    return Response(status_code=204)
