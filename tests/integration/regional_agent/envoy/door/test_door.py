"""The gRPC door without an agent: who may call, what is bounded, how it drains, and how it speaks HTTP/2."""

import asyncio
import itertools
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from regional_agent.envoy.door import frames, health
from regional_agent.envoy.door.callers import DoorCallers
from regional_agent.envoy.door.hpack import HeaderDecoder
from regional_agent.envoy.door.listener import DoorLimits, GrpcDoor
from regional_agent.envoy.door.methods import Call, GrpcError, MessageStream, Methods, Status
from regional_agent.http.callers import CallerRules
from regional_agent.settings import AgentSettings
from regional_agent.tls import tls_of
from tests.certificates import Authority
from tests.parts import part
from tests.waiting import attempts, until
from web.connections import ConnectionLimits
from web.serving import listening

pytestmark = pytest.mark.anyio

TOKEN = "a-service-token-of-tests"
ECHO, HELD, STREAM, DELIVER = (f"/tests.Tests/{name}" for name in ("Echo", "Held", "Stream", "Deliver"))
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
MAX_MESSAGE = 4096
LINK_MS = 1_000  # without an acknowledgement
DELIVER_S = 0.8


@pytest.fixture(scope="session", params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Return both event loops: agents run on uvloop, whose transports are not asyncio's."""
    return "asyncio", {"use_uvloop": request.param}


@dataclass
class TestService:
    """The methods that the tests call."""

    __test__ = False
    is_ready: bool = True
    held: list[Call] = field(default_factory=list)
    ended_streams: int = 0
    lost: int = 0  # messages of `Deliver` that the client has not read in time

    def echo(self, message: bytes, call: Call) -> None:
        if message == b"bug":
            raise RuntimeError("a bug")
        call.respond(message * 100 if message == b"large" else message)

    def hold(self, _: bytes, call: Call) -> None:
        self.held.append(call)

    async def echo_stream(self, stream: MessageStream) -> None:
        async for message in stream:
            if message == b"fail":
                raise GrpcError(Status.FAILED_PRECONDITION, "as requested: 100 %")
            await stream.send(message)
        self.ended_streams += 1

    async def deliver_stream(self, stream: MessageStream) -> None:
        async for message in stream:
            try:
                await stream.deliver(message, asyncio.get_running_loop().time() + DELIVER_S)
            except TimeoutError:
                self.lost += 1

    async def readiness(self) -> bool:
        return self.is_ready

    def methods(self) -> Methods:
        checks = health.HealthService(["tests.Tests"], self.readiness)
        streams = {STREAM: self.echo_stream, health.CHECK: checks.check, health.WATCH: checks.watch}
        streams[DELIVER] = self.deliver_stream
        return Methods({ECHO: self.echo, HELD: self.hold}, streams)


@dataclass
class Door:
    door: GrpcDoor
    rules: CallerRules
    service: TestService
    address: str

    def channel(self, **credentials: Any) -> grpc.aio.Channel:
        if credentials:
            return grpc.aio.secure_channel(self.address, grpc.ssl_channel_credentials(**credentials))
        return grpc.aio.insecure_channel(self.address)


@asynccontextmanager
async def serving(
    limits: ConnectionLimits | None = None, max_streams: int = 100, host: str = "127.0.0.1", **settings: Any
) -> AsyncIterator[Door]:
    given: dict[str, Any] = {
        "region": "us-east",
        "coordinator_url": "http://nowhere",
        "coordinator_token": "x",
        "grpc_port": 0,
    }
    whole = AgentSettings(**given | {"store_url": "redis://127.0.0.1"} | settings)
    rules, service = CallerRules(whole), TestService()
    callers = DoorCallers(rules, service.methods(), public=(health.CHECK, health.WATCH))
    own = DoorLimits(max_streams, MAX_MESSAGE, 16_384, LINK_MS)
    door = GrpcDoor(callers, own, limits or ConnectionLimits(), CollectorRegistry())
    with listening(host, 0) as listener:
        async with door.serving(listener.socket, tls_of(whole, CollectorRegistry()).grpc):
            yield Door(door, rules, service, listener.address.rpartition("//")[2])


async def call(channel: grpc.aio.Channel, message: bytes = b"hello", path: str = ECHO, **options: Any) -> bytes:
    answer: bytes = await channel.unary_unary(path)(message, timeout=60, **options)
    return answer


async def refusal(*arguments: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(*arguments, **options)
    return refused.value.code(), refused.value.details() or ""


async def test_calls_are_answered_and_refused_by_name() -> None:
    async with serving() as door, door.channel() as channel:
        assert await call(channel) == b"hello"
        assert await call(channel, b"") == b""
        assert await asyncio.gather(*(call(channel, b"%d" % n) for n in range(300))) == [b"%d" % n for n in range(300)]
        code = grpc.StatusCode
        too_large = await refusal(channel, b"x" * (MAX_MESSAGE + 1))
        assert too_large == (code.RESOURCE_EXHAUSTED, "a message has at most 4096 bytes")
        assert (await refusal(channel, b"x" * 500_000))[0] == code.RESOURCE_EXHAUSTED
        assert await refusal(channel, path="/no/Such") == (code.UNIMPLEMENTED, "there is no method '/no/Such' here")
        assert (await refusal(channel, path=REFLECTION))[0] == code.UNIMPLEMENTED
        assert (await refusal(channel, b"x" * 99, compression=grpc.Compression.Gzip))[0] == code.UNIMPLEMENTED
        assert (await refusal(channel, b"bug"))[0] == code.INTERNAL
        assert await call(channel) == b"hello", "a bug ends one call only"


async def test_callers_are_those_of_the_http_door() -> None:
    async with serving(service_token=TOKEN) as door, door.channel() as channel:
        right: dict[str, Any] = {"metadata": [("authorization", f"Bearer {TOKEN}")]}
        wrong: dict[str, Any] = {"metadata": [("authorization", "Bearer another-token-of-tests")]}
        assert (await refusal(channel))[0] == grpc.StatusCode.UNAUTHENTICATED
        assert (await refusal(channel, **wrong))[0] == grpc.StatusCode.UNAUTHENTICATED
        assert [await call(channel, **right) for _ in range(3)] == [b"hello"] * 3
        health_stub = health_pb2_grpc.HealthStub(channel)
        assert (await health_stub.Check(health_pb2.HealthCheckRequest())).status == 1, "health needs no token"
        door.rules._service_tokens = ()
        door.rules._adjust_tokens = (b"another",)
        door.rules._note_change()
        assert await call(channel, **right) == b"hello", "no service token is left, so local callers are accepted"
    async with serving() as door, door.channel() as channel:
        page: dict[str, Any] = {"metadata": [("origin", "https://evil.example")]}
        assert (await refusal(channel, **page))[0] == grpc.StatusCode.PERMISSION_DENIED


class RawClient:
    """A client that chooses the bytes of its header blocks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, **settings: int) -> None:
        self.reader, self.writer = reader, writer
        self.decoder, self.streams = HeaderDecoder(16_384), itertools.count(1, 2)
        writer.write(frames.PREFACE + frames.settings({getattr(frames, name): each for name, each in settings.items()}))

    def call(self, *fields: bytes, message: bytes = b"", path: str = ECHO) -> int:
        """Send a call with these further header fields, and return the number of its stream."""
        number = self.open(*fields, path=path)
        self.send(number, message, frames.END_STREAM)
        return number

    def open(self, *fields: bytes, path: str) -> int:
        # POST, http, the path and the content type, none of which changes the table of HPACK
        block = b"\x83\x86\x04%c%b\x0f\x10\x10application/grpc" % (len(path), path.encode())
        number = next(self.streams)
        self.writer.write(frames.frame(frames.HEADERS, frames.END_HEADERS, number, block + b"".join(fields)))
        return number

    def send(self, number: int, message: bytes, flags: int = 0) -> None:
        data = b"\0" + len(message).to_bytes(4) + message
        self.writer.write(frames.frame(frames.DATA, flags, number, data))

    async def status(self, *fields: bytes) -> str:
        """Return the status of a call."""
        number = self.call(*fields)
        while True:
            kind, flags, stream, payload = await self.frame()
            if kind == frames.HEADERS and stream == number and flags & frames.END_STREAM:
                return dict(self.decoder.decode(payload))[b"grpc-status"].decode()

    async def frame(self) -> tuple[int, int, int, bytes]:
        head = await asyncio.wait_for(self.reader.readexactly(frames.HEAD_BYTES), 60)
        payload = await self.reader.readexactly(int.from_bytes(head[:3]))
        return head[3], head[4], int.from_bytes(head[5:]), payload


async def test_answers_wait_for_the_windows_of_the_client() -> None:
    async with serving() as door:
        host, _, port = door.address.rpartition(":")
        client = RawClient(*await asyncio.open_connection(host, int(port)), INITIAL_WINDOW_SIZE=4)
        number, received = client.call(message=b"hello"), b""
        for window, end in ((3, 4), (100, 7), (0, 10)):
            while len(received) < end:
                kind, _, stream, payload = await client.frame()
                received += payload if kind == frames.DATA and stream == number else b""
            assert len(received) == end
            client.writer.write(frames.window_update(number, window) if window else b"")
        assert received == b"\0\0\0\0\5hello"
        assert (await client.frame())[:3] == (frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, number)
        client.writer.close()


async def test_equal_bytes_are_another_head_when_the_table_has_changed() -> None:
    """Heads are looked up by their bytes, with the caller's permission: no caller may get that of another."""
    async with serving(service_token=TOKEN) as door:
        host, _, port = door.address.rpartition(":")
        client = RawClient(*await asyncio.open_connection(host, int(port)))
        right, wrong = (
            b"\x57%c%b" % (len(value), value) for value in (f"Bearer {TOKEN}".encode(), b"Bearer " + b"w" * 20)
        )
        newest = b"\xbe"
        assert [await client.status(each) for each in (right, newest, newest)] == ["0", "0", "0"]
        assert await client.status(wrong) == "16"
        assert await client.status(newest) == "16"
        assert await client.status(b"\xbf") == "0"
        client.writer.close()


async def test_tls_asks_for_certificates_as_the_http_door_does(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ca_file, cert_file, key_file = authority.files("agent")
    files: dict[str, Any] = {"tls_client_ca_file": ca_file, "tls_cert_file": cert_file, "tls_key_file": key_file}
    async with serving(**files) as door:
        root: dict[str, Any] = {"root_certificates": ca_file.read_bytes() if ca_file else b""}
        _, own_cert, own_key = authority.files("proxy", hosts=())
        assert own_cert is not None
        assert own_key is not None
        own = {"certificate_chain": own_cert.read_bytes(), "private_key": own_key.read_bytes()}
        async with door.channel(**root, **own) as channel:
            assert await call(channel, b"large") == b"large" * 100
        async with door.channel(**root) as channel:
            assert (await refusal(channel))[0] == grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_with_an_identity_stands_for_a_token_until_it_ends(tmp_path: Path) -> None:
    """The connection is ended first: no call is refused as unauthenticated on the way."""
    authority = Authority(tmp_path)
    ca_file, cert_file, key_file = authority.files("agent")
    assert ca_file is not None
    root = ca_file.read_bytes()

    def of(name: str, **options: Any) -> dict[str, bytes]:
        certificate, key = authority.issue(name, hosts=(), **options)
        pair = {"certificate_chain": certificate.read_bytes(), "private_key": key.read_bytes()}
        return {"root_certificates": root, **pair}

    files: dict[str, Any] = {"tls_client_ca_file": ca_file, "tls_cert_file": cert_file, "tls_key_file": key_file}
    async with serving(service_identities="spiffe://example.org/envoy", **files) as door:
        async with door.channel(**of("other", uris=["spiffe://example.org/other"])) as channel:
            assert [(await refusal(channel))[0] for _ in range(2)] == [grpc.StatusCode.UNAUTHENTICATED] * 2
        own = of("envoy", uris=["spiffe://example.org/envoy"], ends_in=timedelta(seconds=6))
        async with door.channel(**own) as channel:
            wrong = [("authorization", "Bearer another-token-of-tests")]
            assert (await refusal(channel, metadata=wrong))[0] == grpc.StatusCode.UNAUTHENTICATED
            known = {each.address for each in door.door.clients()}
            async for _ in attempts():
                assert await call(channel) == b"hello"
                if {each.address for each in door.door.clients()} - known:
                    return
            raise AssertionError("the connection outlasts its certificate")


async def test_health_follows_readiness() -> None:
    async with serving() as door, door.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="tests.Tests")
        assert (await stub.Check(request)).status == 1
        watch = stub.Watch(request)
        assert (await watch.read()).status == 1
        door.service.is_ready = False
        assert (await watch.read()).status == 2
        assert (await stub.Check(request)).status == 2
        with pytest.raises(grpc.aio.AioRpcError, match="unknown service"):
            await stub.Check(health_pb2.HealthCheckRequest(service="else"))
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="else"))
        assert (await unknown.read()).status == 3
        watch.cancel()
        unknown.cancel()
        await until(lambda: not door.door.clients()[0].streams)


async def test_streams_carry_more_than_the_windows_hold() -> None:
    async with serving() as door, door.channel() as channel:
        stream = channel.stream_stream(STREAM)(metadata=[("x", "y")])
        sent = [b"%d" % number * 500 for number in range(1000)]

        async def write() -> None:
            for message in sent:
                await stream.write(message)
            await stream.done_writing()

        writing = asyncio.create_task(write())
        received = [message async for message in stream]
        await writing
        assert received == sent
        failing = channel.stream_stream(STREAM)()
        await failing.write(b"fail")
        with pytest.raises(grpc.aio.AioRpcError, match="as requested: 100 %"):
            await failing.read()
        assert door.service.ended_streams == 1


async def test_a_call_that_is_cancelled_is_known_and_forgotten() -> None:
    async with serving() as door, door.channel() as channel:
        task = asyncio.create_task(call(channel, path=HELD))
        await until(lambda: door.service.held)
        assert not door.service.held[0].has_disconnected
        task.cancel()
        await until(lambda: door.service.held[0].has_disconnected)
        door.service.held[0].respond(b"too late")
        assert await call(channel) == b"hello"


async def test_a_connection_has_so_many_calls_at_a_time() -> None:
    async with serving(max_streams=5) as door, door.channel() as channel:
        tasks = [asyncio.create_task(call(channel, path=HELD)) for _ in range(8)]
        await until(lambda: len(door.service.held) == 5)
        assert door.door.clients()[0].streams == 5
        while not all(task.done() for task in tasks):
            for each in door.service.held[:]:
                each.respond(b"")
                door.service.held.remove(each)
            await asyncio.sleep(0)
        assert len(await asyncio.gather(*tasks)) == 8


async def test_calls_under_way_end_before_the_door_closes() -> None:
    async with serving() as door:
        channel = door.channel()
        stream = channel.stream_stream(STREAM)()
        await stream.write(b"one")
        assert await stream.read() == b"one"
        task = asyncio.create_task(call(channel, path=HELD))
        await until(lambda: door.service.held)
        asyncio.get_running_loop().call_later(0.5, lambda: door.service.held[0].respond(b"late"))
    assert await task == b"late"
    assert await stream.read() == grpc.aio.EOF, "streams are told to end"
    assert await stream.code() == grpc.StatusCode.OK
    assert not door.door.clients()
    assert (await refusal(channel))[0] == grpc.StatusCode.UNAVAILABLE
    await channel.close()


async def test_silent_clients_are_dropped() -> None:
    async with serving(ConnectionLimits(request_timeout_s=0.2)) as door:
        host, _, port = door.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        while await asyncio.wait_for(reader.read(1000), 60):
            pass  # its settings
        writer.close()
        http, http_writer = await asyncio.open_connection(host, int(port))
        http_writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"this port serves HTTP/2 only" in await asyncio.wait_for(http.read(), 60)
        http_writer.close()


@pytest.mark.extended
async def test_http2_is_spoken_as_h2spec_demands(anyio_backend: tuple[str, dict[str, bool]]) -> None:
    """Run all 146 cases of h2spec: frames, states, flow control, header compression, malformed requests."""
    h2spec = part("h2spec") / "bin" / "h2spec"
    async with serving() as door:
        host, _, port = door.address.rpartition(":")
        command = [str(h2spec), "-h", host, "-p", port, "-o", "30"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " 0 skipped, 0 failed" in done.stdout
