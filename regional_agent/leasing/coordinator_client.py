"""The agent's client of the coordinator's HTTP API.

Each call goes to the address in use. If no answer comes from there, or one that says the coordinator cannot answer now,
the same call goes to the other addresses at once, to each of them once. All calls may be repeated: an exchange has the
same bytes, an epoch has its nonce, and the others only read or report. Beyond that it retries nothing: each loop owns
its retries.

Each call states the agent's release, and each answer the coordinator's. A coordinator that is too old is refused.
"""

import asyncio
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import httpx
import msgspec
import structlog
from pydantic import SecretStr

from protocol.compatibility.releases import Peer, is_too_old, peer_of, stated, too_old
from protocol.decision_log.messages import DecisionsStored
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
from regional_agent.leasing.rules.addresses import Address, Addresses
from web.tls.http_client import HttpsTransport
from web.tls.reasons import describe, tls_error_in
from web.traces.context import trace_headers

log = structlog.get_logger()

T = TypeVar("T")
TIMEOUT_S = 5.0
CONNECT_S = 2.0  # to one of several addresses
RETURN_S = 10.0  # how often preferred addresses are asked whether they are ready again
POLL_S = 50  # an older coordinator answers after 20
LONG_POLL_S = POLL_S + 10.0
SILENCE_S = 30.0  # the coordinator's heartbeats are far closer than this
# An idle connection. A new one costs one more round trip, while requests wait for their first unit; leases are renewed
# twice in that time. The coordinator keeps connections for longer, so that none is closed when it is used.
KEPT_S = 60.0
CONNECTIONS = 20  # that are kept
JSON = MappingProxyType({"Content-Type": "application/json"})
ABOUT_CONTENT = frozenset({400, 413, 422})
CANNOT_ANSWER = frozenset({502, 503, 504})
NOT_ANSWERED = (httpx.HTTPError, ssl.SSLError)  # an alert that comes after the handshake is no error of httpx


class CoordinatorUnavailable(Exception):
    """The coordinator could not be asked, or could not answer now."""


class NoReply(CoordinatorUnavailable):
    """No reply came in time. The coordinator may have booked the exchange all the same."""


class TlsFailed(CoordinatorUnavailable):
    """One side refused the other's certificate, or TLS failed for another reason. The message says which."""


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


class _CurrentCertificate(httpx.Auth):
    """Sends a request again that was refused because its connection is older than the certificate in use.

    The coordinator closes such a connection. Once all old ones are closed, one with the certificate of now is opened.
    """

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        for _ in range(CONNECTIONS + 1):
            answer = yield request
            if answer.status_code != httpx.codes.UNAUTHORIZED or answer.headers.get("Connection") != "close":
                return


class CoordinatorClient:
    def __init__(
        self,
        urls: Sequence[str],
        token: SecretStr | None,
        region: str,
        agent: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.addresses = Addresses.of(urls)
        self._region = f"/v1/regions/{region}"
        self._tags: dict[str, str] = {}  # of the latest answer of each feed
        self.peer: Peer | None = None  # what the coordinator stated last
        self._polls: defaultdict[Address, set[asyncio.Timeout]] = defaultdict(set)
        self._connect_s = TIMEOUT_S if len(urls) == 1 else CONNECT_S
        limits = httpx.Limits(max_keepalive_connections=CONNECTIONS, keepalive_expiry=KEPT_S)
        self._http = httpx.AsyncClient(
            auth=_CurrentCertificate() if token is None else _CurrentToken(token),
            headers=stated(agent),
            timeout=httpx.Timeout(TIMEOUT_S, connect=self._connect_s, pool=None),
            transport=HttpsTransport(tls, limits) if tls else httpx.AsyncHTTPTransport(limits=limits, trust_env=False),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def open_epoch(self, request: OpenEpoch) -> EpochOpened:
        return await self._post(f"{self._region}/epochs", msgspec.json.encode(request), EpochOpened)

    async def rebind_epoch(self, epoch: int, request: RebindEpoch) -> EpochOpened:
        path = f"{self._region}/epochs/{epoch}:rebind"
        return await self._post(path, msgspec.json.encode(request), EpochOpened)

    async def exchange(self, request: ExchangeRequest, within_s: float | None = None) -> ExchangeResponse:
        """Return the reply, for which each address has `within_s`. Raise NoReply if none came in time from any."""
        body = msgspec.json.encode(request)
        return await self._post(f"{self._region}/exchanges", body, ExchangeResponse, within_s=within_s)

    async def shares(self, request: SharesRequest) -> SharesResponse:
        return await self._post(f"{self._region}/shares", msgspec.json.encode(request), SharesResponse)

    async def log_decisions(self, body: bytes) -> DecisionsStored:
        """Send a batch of the decision log: JSON in gzip."""
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        return await self._post(f"{self._region}/decisions", body, DecisionsStored, headers=headers)

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
        headers = {"Prefer": f"wait={POLL_S}"} | ({"If-None-Match": known} if known else {})
        timeout = httpx.Timeout(LONG_POLL_S, connect=self._connect_s, pool=None)
        answer = await self._send("GET", path, is_poll=True, params=params, headers=headers, timeout=timeout)
        if answer.status_code == httpx.codes.NOT_MODIFIED:
            return None
        content = _decoded(answer, read)
        self._tags[path] = answer.headers.get("ETag", "")
        return content

    async def signals(self) -> AsyncIterator[Signal]:
        """Yield signals as they arrive. Ends, or raises, when the stream does."""
        address = self.addresses.in_use
        try:
            async with self._signal_stream(address) as answer:
                lines = answer.aiter_lines()
                while (line := await self._next_line(lines, address)) is not None:
                    if line.startswith("data:"):
                        yield msgspec.json.decode(line[5:], type=Signal)
        except TimeoutError:
            raise NoReply("the coordinator's address was left") from None
        except NOT_ANSWERED as error:
            failure = _unavailable(error)
            self._leave(address, failure)
            raise failure from error

    @asynccontextmanager
    async def _signal_stream(self, address: Address) -> AsyncIterator[httpx.Response]:
        timeout = httpx.Timeout(TIMEOUT_S, connect=self._connect_s, read=SILENCE_S, pool=None)
        request = self._http.build_request("GET", f"{address.url}{self._region}/signals", timeout=timeout)
        async with self._while_in_use(address):
            answer = await self._http.send(request, stream=True)
        try:
            self._note_release(answer)
            if answer.status_code in CANNOT_ANSWER:
                self._leave(address, CoordinatorUnavailable(f"{answer.status_code}"))
            if answer.status_code != httpx.codes.OK:
                await answer.aread()
                _raise(answer)
            yield answer
        finally:
            await answer.aclose()

    async def _next_line(self, lines: AsyncIterator[str], address: Address) -> str | None:
        async with self._while_in_use(address):
            return await anext(lines, None)

    async def _post(
        self, path: str, body: bytes, type_: type[T], within_s: float | None = None, headers: Mapping[str, str] = JSON
    ) -> T:
        headers = {**headers, **trace_headers()}
        answer = await self._send("POST", path, within_s=within_s, content=body, headers=headers)
        return _decoded(answer, lambda body: msgspec.json.decode(body, type=type_))

    def _note_release(self, answer: httpx.Response) -> None:
        """Note what the coordinator states. Raise CoordinatorRefused if it is too old for this release."""
        peer = peer_of(answer.headers)
        if peer is None:
            return  # such as a proxy's answer
        self.peer = peer
        if is_too_old(peer.release):
            raise CoordinatorRefused(httpx.codes.CONFLICT, too_old("the coordinator", peer.release, "This agent"))

    # --- addresses ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ask the addresses that are not in use whether they are ready, and return to a preferred one that is."""
        while True:
            await asyncio.sleep(RETURN_S)
            for address in self.addresses.to_probe():
                if await self._is_ready(address) and self.addresses.ready(address):
                    log.info("coordinator address in use again", url=address.url)
                    break

    async def _is_ready(self, address: Address) -> bool:
        try:
            answer = await self._http.get(f"{address.url}/readyz", timeout=CONNECT_S)
        except NOT_ANSWERED as error:
            self._leave(address, _unavailable(error))
            return False
        return answer.status_code == httpx.codes.OK

    async def _send(
        self, method: str, path: str, *, within_s: float | None = None, is_poll: bool = False, **options: Any
    ) -> httpx.Response:
        """Return the answer of the address in use, or of the first other one that can answer."""
        failure = CoordinatorUnavailable("there is no address")
        for address in self.addresses.in_order():
            waiting = self._while_in_use(address) if is_poll else asyncio.timeout(within_s)
            try:
                async with waiting:
                    answer = await self._http.request(method, f"{address.url}{path}", **options)
            except TimeoutError:
                failure = NoReply("no reply in time")
                if is_poll:  # another call has found that out, and noted why
                    continue
            except NOT_ANSWERED as error:
                failure = _unavailable(error)
            else:
                if answer.status_code not in CANNOT_ANSWER:
                    self.addresses.answered(address)
                    self._note_release(answer)
                    return answer
                failure = CoordinatorUnavailable(f"{answer.status_code}")
            self._leave(address, failure)
        raise failure

    def _leave(self, address: Address, failure: CoordinatorUnavailable) -> None:
        """Note a failure of an address. If it was in use, the next one is, and what waits at this one goes there."""
        is_first = not address.fault
        if not self.addresses.failed(address, str(failure), is_tls_fault=isinstance(failure, TlsFailed)):
            return
        if is_first:
            log.warning("coordinator address left", url=address.url, reason=str(failure), to=self.addresses.in_use.url)
        now_s = asyncio.get_running_loop().time()
        for poll in self._polls.pop(address, ()):
            poll.reschedule(now_s)

    @asynccontextmanager
    async def _while_in_use(self, address: Address) -> AsyncIterator[None]:
        """Raise TimeoutError once another call has found that this address does not answer."""
        async with asyncio.timeout(None) as poll:
            self._polls[address].add(poll)
            try:
                yield
            finally:
                self._polls[address].discard(poll)


def _unavailable(error: Exception) -> CoordinatorUnavailable:
    """Return why there is no answer, in words where TLS failed."""
    tls_error = tls_error_in(error)
    return (
        CoordinatorUnavailable(f"{type(error).__name__}: {error}")
        if tls_error is None
        else TlsFailed(describe(tls_error))
    )


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
