"""A coordinator of the release after this one, made of this one's: it says more in every message, both ways.

Each object of a message gets an unknown field, answers get values that this release does not have, and what
agents send arrives as a newer agent would send it. So tolerance is tested against whatever may come, and not only
against one release.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Struct
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.blocks import BlockList
from protocol.compatibility.releases import CAPABILITIES_HEADER, RELEASE_HEADER
from protocol.limits.document import PolicyBundle
from protocol.messages import (
    EpochOpened,
    ExchangeRequest,
    ExchangeResponse,
    FrozenBatch,
    OpenEpoch,
    ResetBatch,
    SharesRequest,
    SharesResponse,
    Signal,
)

ADDED = {"added_by_the_next_release": {"deep": [None, 1]}}
RELEASE = b"0.999.0"  # newer than any that this test will see: the newer side decides whether they work together
REQUESTS: Mapping[str, Any] = {"epochs": OpenEpoch, "exchanges": ExchangeRequest, "shares": SharesRequest}
ANSWERS: Mapping[str, Any] = {
    "epochs": EpochOpened,
    "exchanges": ExchangeResponse,
    "shares": SharesResponse,
    "policies": PolicyBundle,
    "blocks": BlockList,
    "resets": ResetBatch,
}
UNKNOWN_SIGNAL = b"event: dance\ndata: " + msgspec.json.encode({"kind": "dance", **ADDED}) + b"\n\n"


def grown(value: Any, type_: Any) -> Any:
    """Return a plain value with a further field in each object that is a struct."""
    origin, parts = get_origin(type_), get_args(type_)
    if origin is Annotated:
        return grown(value, parts[0])
    if isinstance(value, list) and parts:
        return [grown(each, parts[0]) for each in value]
    if isinstance(value, dict) and origin is dict:
        return {name: grown(each, parts[1]) for name, each in value.items()}
    if isinstance(value, dict) and (structs := [each for each in (type_, *parts) if _is_struct(each)]):
        types = {field.encode_name: field.type for each in structs for field in msgspec.structs.fields(each)}
        return {**{name: grown(each, types.get(name)) for name, each in value.items()}, **ADDED}
    return value


def _is_struct(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, Struct)


class NextRelease:
    """Wraps a coordinator. `change` may replace an answer, by the last part of its path."""

    def __init__(self, app: ASGIApp, change: Callable[[str, Any], Any] = lambda _, answer: answer) -> None:
        self._app = app
        self.change = change
        self.grown: set[str] = set()  # the messages that were made longer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope.get("path", "").rpartition("/")[2]
        if scope["type"] != "http" or not _is_of_an_agent(scope):
            await self._app(scope, receive, send)
        elif name == "signals":
            await self._app(scope, receive, self._growing_events(send))
        else:
            await self._app(scope, await self._grown_request(name, scope, receive), self._growing_answer(name, send))

    async def _grown_request(self, name: str, scope: Scope, receive: Receive) -> Receive:
        type_ = REQUESTS.get(name) if scope["method"] == "POST" else None
        if type_ is None:
            return receive
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        request = grown(msgspec.json.decode(body), type_)
        for exchange in request.get("exchanges", ()):
            exchange["frozen"] = _grown_text(exchange["frozen"])
        self.grown.add(f"request of {name}")
        parts: list[Message] = [{"type": "http.request", "body": msgspec.json.encode(request), "more_body": False}]

        async def again() -> Message:
            return parts.pop() if parts else await receive()

        return again

    def _growing_answer(self, name: str, send: Send) -> Send:
        start: Message = {}

        async def growing(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            body = message.get("body", b"")
            if start["status"] in (200, 201) and name in ANSWERS:
                answer = grown(msgspec.json.decode(body), ANSWERS[name])
                body = msgspec.json.encode(self.change(name, answer))
                self.grown.add(f"answer of {name}")
            length = (b"content-length", str(len(body)).encode())
            kept = [each for each in start["headers"] if each[0] not in (b"content-length", RELEASE_HEADER.encode())]
            stated = [(RELEASE_HEADER.encode(), RELEASE), (CAPABILITIES_HEADER.encode(), b"requirements,dancing")]
            headers = [*kept, *stated, length] if body else [*kept, *stated]
            await send({**start, "headers": headers})
            await send({**message, "body": body})

        return growing

    def _growing_events(self, send: Send) -> Send:
        async def growing(message: Message) -> None:
            if message.get("body"):
                events = message["body"].decode().splitlines(keepends=True)
                body = UNKNOWN_SIGNAL + "".join(map(_grown_event, events)).encode()
                self.grown.add("signals")
                message = {**message, "body": body}
            await send(message)

        return growing


def _is_of_an_agent(scope: Scope) -> bool:
    return any(name == RELEASE_HEADER.encode() for name, _ in scope["headers"])


def _grown_text(frozen: str) -> str:
    return msgspec.json.encode(grown(msgspec.json.decode(frozen), FrozenBatch)).decode()


def _grown_event(line: str) -> str:
    name, _, data = line.partition(": ")
    if name != "data":
        return line
    return f"data: {msgspec.json.encode(grown(msgspec.json.decode(data), Signal)).decode()}\n"
