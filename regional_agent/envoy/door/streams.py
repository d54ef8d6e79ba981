"""One call on a connection: a unary call, or a stream of messages in both directions."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from time import perf_counter
from typing import TYPE_CHECKING

import structlog

from regional_agent.envoy.door import frames
from regional_agent.envoy.door.frames import ErrorCode, StreamFault
from regional_agent.envoy.door.methods import GrpcError, Status, StreamMethod

if TYPE_CHECKING:
    from regional_agent.envoy.door.callers import AuthorizedHead
    from regional_agent.envoy.door.connection import GrpcConnection
    from regional_agent.envoy.door.listener import GrpcDoor

PREFIX_BYTES = 5  # of a message: a flag, and its length
MAX_TEXT_BYTES = 1_024  # of an error, in the trailers
NOT_GRPC = b"This port serves gRPC: POST with the content type application/grpc.\n"
BUG = GrpcError(Status.INTERNAL, "an unexpected error: the agent's log has it")
COMPRESSED = GrpcError(Status.UNIMPLEMENTED, "compressed messages are not accepted")
NOT_WHOLE = GrpcError(Status.INTERNAL, "the request is not one whole message")

log = structlog.get_logger()


def _frame_around(flags: int, block: bytes) -> tuple[bytes, bytes]:
    """Return what is in front of the number of its stream in a HEADERS frame, and what is behind it."""
    whole = frames.frame(frames.HEADERS, frames.END_HEADERS | flags, 0, block)
    return whole[:5], whole[frames.HEAD_BYTES :]


_HEAD = b"\x88" + frames.field("content-type", "application/grpc")  # \x88: status 200 of the static table
_OK = frames.field("grpc-status", "0")
_HEAD_BEGIN, _HEAD_END = _frame_around(0, _HEAD)
_OK_BEGIN, _OK_END = _frame_around(frames.END_STREAM, _OK)


class Stream:
    """A call. It is the `Call` of unary methods and the `MessageStream` of others.

    Most calls use few of these fields, so defaults are those of the class.
    """

    is_remote_done = False
    _partial = b""  # of a message whose end has not arrived
    _received = 0  # bytes of the request
    _unacknowledged = 0
    _has_head = False
    _unsent = b""
    _last_frame: bytes | None = None  # which ends the stream, once the call is answered
    _is_cancelled = False
    _input_ended = False
    _wake: asyncio.Event | None = None
    _task: asyncio.Task[None] | None = None
    _inbox: deque[bytes]  # whole messages that the method has not taken; unary calls have none

    def __init__(
        self,
        connection: "GrpcConnection",
        door: "GrpcDoor",
        stream_id: int,
        head: "AuthorizedHead",
        send_window: int,
    ) -> None:
        self._connection = connection
        self._door = door
        self.id = stream_id
        self.head = head
        self.send_window = send_window
        self.began_s = perf_counter()
        self._room = door.stream_window  # of the window that the client has
        if head.stream is not None:
            self._inbox = deque()

    # --- input --------------------------------------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Return whether the request of a unary call has not arrived."""
        return self.head.stream is None and not self.is_remote_done

    def begin(self, *, is_last: bool) -> None:
        self.is_remote_done = is_last
        head = self.head
        if head.http_status:
            if is_last:
                self._end_http(head.http_status)
        elif head.refusal is not None:
            self.fail(head.refusal)
        elif is_last and head.stream is None:
            self._check_length()
            self.fail(NOT_WHOLE)
        elif head.unverified is not None:
            self._task = asyncio.create_task(self._verify())
        elif head.stream is not None:
            self._start(head.stream)

    def receive(self, data: bytes, frame_bytes: int, *, is_last: bool) -> None:
        """Take data of the request; `frame_bytes` counts padding as well."""
        self._received += len(data)
        self._room -= frame_bytes
        if self._room < 0:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, self.id)
        head, self.is_remote_done = self.head, is_last
        if is_last and head.content_length is not None:
            self._check_length()
        if self._last_frame is not None:
            return  # the call is answered already
        data = self._partial + data if self._partial else data
        if head.stream is not None:
            self._unacknowledged += frame_bytes
            self._take_messages(data)
        elif head.http_status:
            if is_last:
                self._end_http(head.http_status)
        elif is_last and head.unverified is None:
            self._decide(data)
        else:
            self._partial = data
            self._check_size(data)

    def _check_length(self) -> None:
        if self.head.content_length not in (None, self._received):
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, self.id)

    def _check_size(self, data: bytes) -> bool:
        """Return whether a message may be as large as it says; answer the call if not."""
        if len(data) < PREFIX_BYTES or int.from_bytes(data[1:PREFIX_BYTES]) <= self._door.max_message_bytes:
            return True
        text = f"a message has at most {self._door.max_message_bytes} bytes"
        self.fail(GrpcError(Status.RESOURCE_EXHAUSTED, text))
        return False

    def _decide(self, data: bytes) -> None:
        """Call a unary method with the one message of its request."""
        length = int.from_bytes(data[1:PREFIX_BYTES])
        if length > self._door.max_message_bytes:
            self._check_size(data)
        elif len(data) != PREFIX_BYTES + length:
            self.fail(NOT_WHOLE)
        elif data[0]:
            self.fail(COMPRESSED)
        else:
            assert self.head.unary is not None
            try:
                self.head.unary(data[PREFIX_BYTES:], self)
            except GrpcError as error:
                self.fail(error)
            except Exception:
                log.exception("gRPC call failed", method=self.head.path)
                self.fail(BUG)

    def _take_messages(self, data: bytes) -> None:
        """Keep the whole messages of a stream for its method."""
        while len(data) >= PREFIX_BYTES and self._check_size(data):
            end = PREFIX_BYTES + int.from_bytes(data[1:PREFIX_BYTES])
            if data[0]:
                self.fail(COMPRESSED)
                return
            if len(data) < end:
                break
            self._inbox.append(data[PREFIX_BYTES:end])
            data = data[end:]
        self._partial = data
        if not self._inbox:
            self._acknowledge()  # what has arrived is a part of one message: let the rest come
        self._notify()

    def _acknowledge(self) -> None:
        """Let the client send as much as has been taken."""
        if self._unacknowledged and not self.is_remote_done:
            self._connection.transport.write(frames.window_update(self.id, self._unacknowledged))
            self._room += self._unacknowledged
            self._unacknowledged = 0

    def end_input(self) -> None:
        """End the iteration over the messages of a stream: the agent shuts down."""
        self._input_ended = True
        self._notify()

    async def _verify(self) -> None:
        """Verify the caller's token, for which keys of its issuer may have to be fetched, and go on."""
        self.head = await self._door.callers.verify(self.head)
        if self.head.refusal is not None:
            self.fail(self.head.refusal)
        elif self.head.stream is not None:
            self._start(self.head.stream)
        elif self.is_remote_done:
            self._decide(self._partial)

    # --- unary calls --------------------------------------------------------------------------------------------------

    @property
    def has_disconnected(self) -> bool:
        return self._is_cancelled

    def respond(self, message: bytes) -> None:
        if self._is_cancelled:
            return
        size, number = PREFIX_BYTES + len(message), self.id.to_bytes(4)
        data = b"\0" + len(message).to_bytes(4) + message
        self._door.metrics.note(self.head.path, Status.OK, perf_counter() - self.began_s)
        if self._connection.take_whole(self, size):
            data_head = size.to_bytes(3) + b"\0\0" + number
            whole = (_HEAD_BEGIN, number, _HEAD_END, data_head, data, _OK_BEGIN, number, _OK_END)
            self._connection.transport.write(b"".join(whole))
            self._connection.end(self)
        else:  # the client's windows are small, or it is slow
            self._write_head()
            self._unsent, self._last_frame = data, self._trailers(_OK)
            self.flush()

    def fail(self, error: GrpcError) -> None:
        text = _percent_encoded(str(error).encode()[:MAX_TEXT_BYTES])
        fields = frames.field("grpc-status", str(int(error.status))), frames.field("grpc-message", text)
        self._finish(error.status, *fields)

    # --- streams of messages ------------------------------------------------------------------------------------------

    @property
    def peer(self) -> str:
        return self._connection.peer

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.head.metadata

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            while self._inbox:
                yield self._inbox.popleft()
            self._acknowledge()
            if self.is_remote_done or self._input_ended:
                return
            await self._wait()

    async def send(self, message: bytes) -> None:
        self._write_head()
        self._unsent += b"\0" + len(message).to_bytes(4) + message
        self.flush()
        while self._unsent:
            await self._wait()

    async def deliver(self, message: bytes, until_s: float) -> None:
        try:
            async with asyncio.timeout_at(until_s):
                await self.send(message)
                await self._connection.ping()
        except TimeoutError:
            self._connection.drop_silent()
            raise

    async def _wait(self) -> None:
        if self._wake is None:
            self._wake = asyncio.Event()
        self._wake.clear()
        await self._wake.wait()

    def _notify(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _start(self, method: StreamMethod) -> None:
        self._task = asyncio.create_task(self._run(method))

    async def _run(self, method: StreamMethod) -> None:
        try:
            await method(self)
        except GrpcError as error:
            self.fail(error)
        except Exception:
            log.exception("gRPC stream failed", method=self.head.path)
            self.fail(BUG)
        else:
            self._finish(Status.OK, _OK)

    # --- output -------------------------------------------------------------------------------------------------------

    def _write_head(self) -> None:
        if not self._has_head:
            self._has_head = True
            self._connection.transport.write(_HEAD_BEGIN + self.id.to_bytes(4) + _HEAD_END)

    def _trailers(self, block: bytes) -> bytes:
        return frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, self.id, block)

    def _finish(self, status: Status, *fields: bytes) -> None:
        """End the call with these trailers, behind what is still to be sent."""
        if self._is_cancelled or self._last_frame is not None:
            return
        self._door.metrics.note(self.head.path, status, perf_counter() - self.began_s)
        self._last_frame = self._trailers(b"".join(fields if self._has_head else (_HEAD, *fields)))
        self.flush()

    def _end_http(self, status: int) -> None:
        """Answer a whole request that is no gRPC as HTTP does."""
        self._check_length()
        block = frames.field(":status", str(status)) + frames.field("content-type", "text/plain")
        self._connection.transport.write(frames.frame(frames.HEADERS, frames.END_HEADERS, self.id, block))
        self._unsent, self._last_frame = NOT_GRPC, frames.frame(frames.DATA, frames.END_STREAM, self.id)
        self.flush()

    def flush(self) -> None:
        """Send as much as the client's windows have room for."""
        if self._is_cancelled:
            return
        transport = self._connection.transport
        while self._unsent and (room := self._connection.take_window(self, len(self._unsent))):
            transport.write(frames.frame(frames.DATA, 0, self.id, self._unsent[:room]))
            self._unsent = self._unsent[room:]
        if self._unsent:
            return
        if self._last_frame is None:
            self._notify()
        else:
            transport.write(self._last_frame)
            self._connection.end(self)

    def cancel(self) -> None:
        """Note that nothing reaches the client any more."""
        self._is_cancelled, self._unsent = True, b""
        if self._task is not None:
            self._task.cancel()


def _percent_encoded(text: bytes) -> str:
    """Return a text as the header `grpc-message` has it."""
    return "".join(chr(byte) if 0x20 <= byte < 0x7F and byte != 0x25 else f"%{byte:02X}" for byte in text)
