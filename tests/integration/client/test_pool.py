"""The connection pools of the clients handle a peer that stalls, breaks off and closes."""

import asyncio
import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from leasehold.client._async.pool import AsyncConnectionPool
from leasehold.client._sync.pool import ConnectionPool
from leasehold.client.agent_protocol import AgentUnavailable, Call, Response
from leasehold.client.http1 import Timeouts, parse_url

ONCE = Call("POST", "/v1/check", b"{}", repeatable=False)
AGAIN = ONCE._replace(repeatable=True)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nRateLimit: r\r\n\r\n{}"
LAST_ANSWER = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"

Behaviour = list[bytes | None]  # for one connection: its answer to each request, or None to close


class Peer:
    """A server whose connections follow the lines of a script; the last line is for all others."""

    def __init__(self, listener: socket.socket, script: list[Behaviour], answers_from: int) -> None:
        self._listener = listener
        self._script = script
        self._answers_from = answers_from  # answers once there are this many connections
        self._may_answer = threading.Event()
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = threading.Semaphore(0)

    def run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                behaviour = self._script[min(self.connections, len(self._script) - 1)]
                self.connections += 1
                if self.connections >= self._answers_from:
                    self._may_answer.set()
                threading.Thread(target=self._serve, args=(connection, behaviour), daemon=True).start()

    def _serve(self, connection: socket.socket, behaviour: Behaviour) -> None:
        with connection:
            for answer in behaviour:
                if answer is None:
                    break
                request = connection.recv(65_536)
                if not request:
                    return
                self.requests.append(request)
                self._may_answer.wait(10)
                connection.sendall(answer)
            else:
                connection.recv(1)
        self.closed.release()


@contextmanager
def peer(script: list[Behaviour], path: Path | None = None, answers_from: int = 1) -> Iterator[tuple[Peer, str]]:
    listener = socket.socket(socket.AF_INET if path is None else socket.AF_UNIX)
    listener.bind(("127.0.0.1", 0) if path is None else str(path))
    listener.listen()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}" if path is None else f"unix://{path}"
    server = Peer(listener, script, answers_from)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server, url
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


Caller = Callable[[list[Call]], list[Response | str]]


def calls(
    url: str,
    kind: str,
    timeout_s: float = 5.0,
    between: Callable[[], object] = lambda: None,
    longest_wait_s: float = 30.0,
) -> Caller:
    """Return a function that makes calls one after the other through one pool."""

    def blocking(wanted: list[Call]) -> list[Response | str]:
        connections = ConnectionPool(parse_url(url), "secret", Timeouts(timeout_s, longest_wait_s), 4)
        answers: list[Response | str] = []
        for call in wanted:
            try:
                answers.append(connections.call(call))
            except AgentUnavailable as error:
                answers.append(str(error))
            between()
        connections.close()
        return answers

    async def awaited(wanted: list[Call]) -> list[Response | str]:
        connections = AsyncConnectionPool(parse_url(url), "secret", Timeouts(timeout_s, longest_wait_s), 4)
        answers: list[Response | str] = []
        for call in wanted:
            try:
                answers.append(await connections.call(call))
            except AgentUnavailable as error:
                answers.append(str(error))
            await asyncio.to_thread(between)
        await connections.close()
        return answers

    return blocking if kind == "blocking" else lambda wanted: asyncio.run(awaited(wanted))


both = pytest.mark.parametrize("kind", ["blocking", "awaited"])


@both
def test_a_connection_is_kept_for_the_next_call(kind: str) -> None:
    with peer([[ANSWER] * 3]) as (server, url):
        answers = calls(url, kind)([ONCE] * 3)
    assert [answer == (200, {"content-length": "2", "ratelimit": "r"}, b"{}") for answer in answers] == [True] * 3
    assert server.connections == 1
    assert b"Authorization: Bearer secret\r\n" in server.requests[0]


@both
def test_a_unix_socket_works_like_tcp(kind: str, tmp_path: Path) -> None:
    with peer([[ANSWER]], tmp_path / "agent.sock") as (server, url):
        [answer] = calls(url, kind)([ONCE])
    assert isinstance(answer, Response)
    assert server.connections == 1


@both
def test_a_connection_with_connection_close_is_not_used_again(kind: str) -> None:
    with peer([[LAST_ANSWER]]) as (server, url):
        calls(url, kind)([ONCE, ONCE])
    assert server.connections == 2


@both
def test_a_connection_that_was_closed_while_idle_is_replaced(kind: str) -> None:
    with peer([[ANSWER, None], [ANSWER]]) as (server, url):
        waited: list[bool] = []

        def until_it_is_closed() -> None:
            if not waited:
                waited.append(server.closed.acquire(timeout=10))

        answers = calls(url, kind, between=until_it_is_closed)([ONCE, ONCE])
    assert [isinstance(answer, Response) for answer in answers] == [True, True]
    assert (server.connections, len(server.requests)) == (2, 2)


@both
def test_a_repeatable_call_that_was_cut_off_is_repeated_once(kind: str) -> None:
    with peer([[b"HTTP/1.1 200", None], [ANSWER]]) as (server, url):
        [answer] = calls(url, kind)([AGAIN])
    assert isinstance(answer, Response)
    assert len(server.requests) == 2
    with peer([[b"HTTP/1.1 200", None]]) as (server, url):
        [answer] = calls(url, kind)([AGAIN])
    assert isinstance(answer, str)
    assert len(server.requests) == 2


@both
def test_a_call_that_may_have_been_charged_is_not_repeated(kind: str) -> None:
    with peer([[b"HTTP/1.1 200", None], [ANSWER]]) as (server, url):
        [answer] = calls(url, kind)([ONCE])
    assert isinstance(answer, str)
    assert "before it had answered" in answer
    assert len(server.requests) == 1


@both
def test_a_stalled_answer_times_out(kind: str) -> None:
    with peer([[b"HTTP/1.1 200"]]) as (_, url):
        [answer] = calls(url, kind, timeout_s=0.05)([AGAIN])
    assert answer == "the agent did not answer in time"


@both
def test_a_slow_answer_is_awaited_while_the_agent_is_alive(kind: str) -> None:
    """The peer answers when a second connection has sent its health check."""
    with peer([[ANSWER], [LAST_ANSWER]], answers_from=2) as (server, url):
        [answer] = calls(url, kind, timeout_s=0.05)([ONCE])
    assert isinstance(answer, Response)
    assert server.connections == 2
    assert b"GET /healthz " in server.requests[1]


@both
def test_the_longest_wait_ends_a_call_to_a_responsive_agent(kind: str) -> None:
    with peer([[b"HTTP/1.1 200"], [LAST_ANSWER]]) as (server, url):
        [answer] = calls(url, kind, timeout_s=0.05, longest_wait_s=0.4)([AGAIN])
    assert answer == "the agent is alive, and did not answer in time"
    assert [request.partition(b" ")[0] for request in server.requests[:2]] == [b"POST", b"GET"]


@both
def test_an_answer_that_is_not_http_is_a_failure(kind: str) -> None:
    with peer([[b"hello\r\n\r\n"]]) as (_, url):
        [answer] = calls(url, kind)([ONCE])
    assert isinstance(answer, str)
    assert "not HTTP" in answer


@both
def test_a_refused_connection_is_named(kind: str) -> None:
    with peer([[]]) as (_, url):
        pass
    [answer] = calls(url, kind)([ONCE])
    assert isinstance(answer, str)
    assert str(errno.ECONNREFUSED) in answer


@pytest.mark.parametrize("url", ["ftp://a:1", "127.0.0.1:8411", "http://a/path", "unix:", ""])
def test_an_unsupported_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="neither"):
        parse_url(url)


def test_threads_share_the_connections_of_a_pool() -> None:
    with peer([[ANSWER] * 16], answers_from=2) as (server, url):
        connections = ConnectionPool(parse_url(url), None, Timeouts(10.0, 10.0), size=2)
        answers: list[Response] = []
        threads = [threading.Thread(target=lambda: answers.append(connections.call(ONCE))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        connections.close()
    assert (len(answers), server.connections) == (16, 2)


async def _all_at_once(url: str) -> list[Response]:
    connections = AsyncConnectionPool(parse_url(url), None, Timeouts(10.0, 10.0), size=2)
    answers = await asyncio.gather(*(connections.call(ONCE) for _ in range(16)))
    await connections.close()
    return answers


def test_tasks_share_the_connections_of_a_pool() -> None:
    with peer([[ANSWER] * 16], answers_from=2) as (server, url):
        assert len(asyncio.run(_all_at_once(url))) == 16
    assert server.connections == 2


def test_waiting_for_a_busy_pool_times_out() -> None:
    with peer([[b"HTTP/1.1 200"]]) as (server, url):
        connections = ConnectionPool(parse_url(url), None, Timeouts(0.2, 0.2), size=0)
        with pytest.raises(AgentUnavailable, match="busy"):
            connections.call(ONCE)
    assert server.connections == 0
