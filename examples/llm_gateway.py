"""A gateway to a language model, which limits each customer by requests and by tokens.

How many tokens an answer has is known when it is there. So the gateway holds as many as the caller permits, commits
those that the model used, and the rest is available again. A request counts as one, whatever its tokens.

    eval "$(./dev env)"
    uvicorn examples.llm_gateway:app --port 9000
    curl -i http://127.0.0.1:9000/v1/chat -H 'X-Tenant: acme' --json '{"prompt": "Say hello", "max_tokens": 4000}'

The quotas `requests` and `tokens` are in the limits of `./dev up`. LEASEHOLD_AGENT is the address of another agent.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Header, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from leasehold import AsyncClient, Denied

client = AsyncClient(os.environ.get("LEASEHOLD_AGENT", "http://127.0.0.1:8411"))


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with client:
        yield


class Prompt(BaseModel):
    prompt: str
    max_tokens: Annotated[int, Field(ge=1, le=100_000)] = 4_000


app = FastAPI(lifespan=lifespan)


@app.exception_handler(Denied)
async def too_many(_: Request, denied: Denied) -> JSONResponse:
    """Answer a denial with its headers, which tell the caller when to come back."""
    return JSONResponse({"error": "too many requests or tokens"}, 429, dict(denied.decision.headers))


@app.post("/v1/chat")
async def chat(body: Prompt, tenant: Annotated[str, Header(alias="X-Tenant")]) -> dict[str, str | int]:
    subject = {"tenant": tenant, "route": "/v1/chat", "method": "POST"}
    async with client.holding(subject, costs={"tokens": body.max_tokens}, ttl_ms=120_000) as held:
        text, tokens = complete(body.prompt, body.max_tokens)
        await held.commit(costs={"tokens": tokens})
    return {"text": text, "tokens": tokens}


def complete(prompt: str, max_tokens: int) -> tuple[str, int]:
    """Stand in for the model: return a text, and how many tokens the prompt and the text have."""
    words = prompt.split()
    answer = ["You", "said:", *words][:max_tokens]
    return " ".join(answer), min(max_tokens, len(words) + len(answer))
