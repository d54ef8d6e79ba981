"""Whatever a client sends, a connection of the gRPC door answers or ends it, and raises nothing."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from regional_agent.envoy.door import frames
from regional_agent.envoy.door.callers import DoorCallers
from regional_agent.envoy.door.connection import GrpcConnection
from regional_agent.envoy.door.listener import DoorLimits, GrpcDoor
from regional_agent.envoy.door.methods import Call, MessageStream, Methods
from regional_agent.http.callers import CallerRules
from regional_agent.settings import AgentSettings
from web.connections import ConnectionLimits

# A call of a method, of a stream, of neither, one that is no gRPC, and what HPACK forbids.
BLOCKS = [
    *(b"\x83\x86\x04\x02%b\x0f\x10\x10application/grpc" % path for path in (b"/u", b"/s", b"/x")),
    b"\x82\x86\x84",
    b"\x40\x01a\x01b",
    b"\xff\xff\xff\xff",
]
payloads = st.sampled_from([*BLOCKS, b"\0\0\0\0\0", b"\0\0\0\0\3abc", b"\1\0\0\0\0", b"\0\xff\0\0\0"]) | st.binary(
    max_size=40
)
kinds = st.sampled_from([frames.HEADERS, frames.DATA]) | st.integers(0, 11)
flags = st.sampled_from([frames.END_HEADERS, frames.END_HEADERS | frames.END_STREAM]) | st.integers(0, 255)
sent = st.lists(st.tuples(kinds, flags, st.integers(0, 9), payloads), max_size=30)


class Transport(asyncio.Transport):
    """The client's side of a connection, which takes everything."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.received = bytearray()
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.received += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def echo(message: bytes, call: Call) -> None:
    call.respond(message)


async def echo_stream(stream: MessageStream) -> None:
    async for message in stream:
        await stream.send(message)


def door() -> GrpcDoor:
    settings = AgentSettings(
        region="us-east",
        coordinator_url="http://nowhere",
        coordinator_token=SecretStr("x"),
        store_url=SecretStr("redis://127.0.0.1"),
    )
    callers = DoorCallers(CallerRules(settings), Methods({"/u": echo}, {"/s": echo_stream}))
    return GrpcDoor(callers, DoorLimits(4, 1024, 1024, 1_000), ConnectionLimits(), CollectorRegistry())


@given(sent, st.integers(1, 50))
def test_no_sequence_of_frames_raises(sequence: list[tuple[int, int, int, bytes]], chunk: int) -> None:
    data = frames.PREFACE + frames.settings({}) + b"".join(frames.frame(*each) for each in sequence)

    async def send() -> Transport:
        connection, transport = GrpcConnection(door()), Transport()
        connection.connection_made(transport)
        for at in range(0, len(data), chunk):
            if not transport.is_closed:
                connection.data_received(data[at : at + chunk])
                await asyncio.sleep(0)
        connection.connection_lost(None)
        assert connection.is_idle
        return transport

    assert_whole_frames(bytes(asyncio.run(send()).received))


def assert_whole_frames(data: bytes) -> None:
    """Assert that everything that was sent is frames of a legal size."""
    while data:
        length = int.from_bytes(data[:3])
        assert length <= frames.MAX_FRAME_BYTES
        assert len(data) >= frames.HEAD_BYTES + length
        data = data[frames.HEAD_BYTES + length :]
