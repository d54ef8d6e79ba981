"""The agent's client of the coordinator's HTTP API. It retries nothing: each loop owns its retries.

Each call states the agent's release, and each answer the coordinator's. A coordinator that is too old is refused.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from typing import TypeVar

import httpx
import msgspec
from pydantic import SecretStr

from protocol.compatibility.releases import Peer, is_too_old, peer_of, stated, too_old
from protocol.messages import (
    EpochOpened,
    ExchangeRequest,
    ExchangeResponse,
    OpenEpoch,
    RebindEpoch,
    SharesRequest,
    SharesResponse,
    Signal,
)

T = TypeVar("T")
LONG_POLL_S = 30.0
SILENCE_S = 30.0  # the coordinator's heartbeats are far closer than this
# An idle connection. A new one costs one more round trip, while requests wait for their first unit; leases are renewed
# twice in that time. The coordinator keeps connections for longer, so that none is closed when it is used.
KEPT_S = 60.0
ABOUT_CONTENT = frozenset({400, 413, 422})


class CoordinatorUnavailable(Exception):
    """The coordinator could not be asked, or could not answer now."""


class CoordinatorFailed(CoordinatorUnavailable):
    """The coordinator answered 500: it has a fault, which may be one with this message alone."""


class CoordinatorRefused(Exception):
    """The coordinator understood and said no. Asking again the same way gives the same answer."""

    def __init__(self, status: int, detail: str, refusal: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.refusal = refusal  # the refusal's name, if it has one
        self.retry_after_s = retry_after_s  # if the coordinator says when to ask again

    @property
    def is_about_content(self) -> bool:
        """Return whether the message is malformed or too large, so that a part of it may be accepted."""
        return self.status in ABOUT_CONTENT


class _CurrentToken(httpx.Auth):
    """Sends the token as it is now: one in a file may be changed while the agent runs."""

    def __init__(self, token: SecretStr) -> None:
        self._token = token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = f"Bearer {self._token.get_secret_value()}"
        yield request


class CoordinatorClient:
    def __init__(self, url: str, token: SecretStr, region: str, agent: str = "") -> None:
        self._region = f"/v1/regions/{region}"
        self._tags: dict[str, str] = {}  # of the latest answer of each feed
        self.peer: Peer | None = None  # what the coordinator stated last
        self._http = httpx.AsyncClient(
            base_url=url,
            auth=_CurrentToken(token),
            headers=stated(agent),
            timeout=httpx.Timeout(5.0, pool=None),
            limits=httpx.Limits(keepalive_expiry=KEPT_S),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def open_epoch(self, request: OpenEpoch) -> EpochOpened:
        return await self._post(f"{self._region}/epochs", msgspec.json.encode(request), EpochOpened)

    async def rebind_epoch(self, epoch: int, request: RebindEpoch) -> EpochOpened:
        path = f"{self._region}/epochs/{epoch}:rebind"
        return await self._post(path, msgspec.json.encode(request), EpochOpened)

    async def exchange(self, request: ExchangeRequest) -> ExchangeResponse:
        return await self._post(f"{self._region}/exchanges", msgspec.json.encode(request), ExchangeResponse)

    async def shares(self, request: SharesRequest) -> SharesResponse:
        return await self._post(f"{self._region}/shares", msgspec.json.encode(request), SharesResponse)

    async def policies(self, since: int | None, read: Callable[[bytes], T]) -> T | None:
        """Read the newest policies, or return None if none newer than `since` arrived while the coordinator waited."""
        return await self._newer("/v1/policies", since, read)

    async def blocks(self, since: int | None, read: Callable[[bytes], T]) -> T | None:
        """Read the newest block list, or return None as `policies` does."""
        return await self._newer("/v1/blocks", since, read)

    async def resets(self, since: int | None, read: Callable[[bytes], T]) -> T | None:
        """Read the resets after `since`, or return None as `policies` does. An older coordinator has none."""
        try:
            return await self._newer("/v1/resets", since, read)
        except CoordinatorRefused as refused:
            if refused.status != httpx.codes.NOT_FOUND:
                raise
            await asyncio.sleep(LONG_POLL_S)
            return None

    async def _newer(self, path: str, since: int | None, read: Callable[[bytes], T]) -> T | None:
        params = {} if since is None else {"since": since}
        known = self._tags.get(path) if since is not None else None  # a restored ledger repeats numbers
        headers = {"If-None-Match": known} if known else {}
        try:
            answer = await self._http.get(path, params=params, headers=headers, timeout=LONG_POLL_S)
        except httpx.HTTPError as error:
            raise CoordinatorUnavailable(f"{type(error).__name__}: {error}") from error
        self._note_release(answer)
        if answer.status_code == httpx.codes.NOT_MODIFIED:
            return None
        content = _decoded(answer, read)
        self._tags[path] = answer.headers.get("ETag", "")
        return content

    async def signals(self) -> AsyncIterator[Signal]:
        """Yield signals as they arrive. Ends, or raises, when the stream does."""
        timeout = httpx.Timeout(5.0, read=SILENCE_S, pool=None)
        try:
            async with self._http.stream("GET", f"{self._region}/signals", timeout=timeout) as answer:
                self._note_release(answer)
                if answer.status_code != httpx.codes.OK:
                    await answer.aread()
                    _raise(answer)
                async for line in answer.aiter_lines():
                    if line.startswith("data:"):
                        yield msgspec.json.decode(line[5:], type=Signal)
        except httpx.HTTPError as error:
            raise CoordinatorUnavailable(f"{type(error).__name__}: {error}") from error

    async def _post(self, path: str, body: bytes, type_: type[T]) -> T:
        try:
            answer = await self._http.post(path, content=body, headers={"Content-Type": "application/json"})
        except httpx.HTTPError as error:
            raise CoordinatorUnavailable(f"{type(error).__name__}: {error}") from error
        self._note_release(answer)
        return _decoded(answer, lambda body: msgspec.json.decode(body, type=type_))

    def _note_release(self, answer: httpx.Response) -> None:
        """Note what the coordinator states. Raise CoordinatorRefused if it is too old for this release."""
        peer = peer_of(answer.headers)
        if peer is None:
            return  # such as a proxy's answer
        self.peer = peer
        if is_too_old(peer.release):
            raise CoordinatorRefused(httpx.codes.CONFLICT, too_old("the coordinator", peer.release, "This agent"))


def _decoded(answer: httpx.Response, read: Callable[[bytes], T]) -> T:
    if answer.status_code >= httpx.codes.BAD_REQUEST:
        _raise(answer)
    try:
        return read(answer.content)
    except msgspec.MsgspecError as error:
        raise CoordinatorUnavailable(f"the coordinator's answer could not be decoded: {error}") from error


def _raise(answer: httpx.Response) -> None:
    status = answer.status_code
    if status == httpx.codes.INTERNAL_SERVER_ERROR:
        raise CoordinatorFailed(f"{status}")
    if status >= httpx.codes.INTERNAL_SERVER_ERROR or status == httpx.codes.TOO_MANY_REQUESTS:
        raise CoordinatorUnavailable(f"{status}")
    raise CoordinatorRefused(status, answer.text[:500], _refusal(answer), _retry_after_s(answer))


def _refusal(answer: httpx.Response) -> str:
    try:
        return msgspec.json.decode(answer.content, type=_Named).refusal
    except msgspec.MsgspecError:
        return ""


def _retry_after_s(answer: httpx.Response) -> float | None:
    told = answer.headers.get("Retry-After", "")
    return float(told) if told.isdecimal() else None


class _Named(msgspec.Struct):
    refusal: str = ""
