"""One HTTP/2 connection of a gRPC client, read and written without a library.

A proxy asks for each of its requests, so what one call costs is what a rate limit service costs. Two facts make a small
server enough, and a cheap one: the messages of these services are small, and the head of a proxy's calls repeats. So a
header block that changes no table is looked up by its bytes, together with the method that it names and the caller's
permission, and an answer is one write: static bytes, the message, static bytes. Everything else of HTTP/2 is handled
as RFC 9113 has it (`h2spec` passes), but no more than a server of gRPC needs: nothing is pushed, and priorities are
ignored.
"""

import asyncio
from collections import deque
from time import perf_counter, time
from typing import TYPE_CHECKING, NamedTuple

from regional_agent.envoy.door import frames
from regional_agent.envoy.door.frames import ConnectionFault, ErrorCode, StreamFault
from regional_agent.envoy.door.heads import MalformedRequest, check_fields
from regional_agent.envoy.door.hpack import Header, HeaderDecoder, HeaderListTooLarge, InvalidHeaderBlock
from regional_agent.envoy.door.links import reset_link
from regional_agent.envoy.door.streams import Stream
from web.connections import SILENT
from web.tls.peers import PeerCertificate, call_before_end

if TYPE_CHECKING:
    from regional_agent.envoy.door.callers import AuthorizedHead
    from regional_agent.envoy.door.listener import GrpcDoor

MAX_KNOWN_HEADS = 64
MAX_CONTINUATIONS = 32  # of one header block
MAX_RESETS = 10_000  # by the client, in one second
REMEMBERED_RESETS = 128  # streams that this side has reset, whose late frames are ignored
GOAWAY_S = 0.2  # in which calls that the client began before it read the GOAWAY still arrive
WINDOW = 1 << 20  # bytes of all streams together that the client may send ahead


class _OpenBlock(NamedTuple):
    """A header block whose end has not arrived."""

    stream_id: int
    flags: int
    pieces: list[bytes]


class GrpcConnection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, door: "GrpcDoor") -> None:
        self._door = door
        self._unread = b""
        self._has_preface = False
        self._has_settings = False
        self._decoder = HeaderDecoder(door.max_header_bytes)
        self._heads: dict[bytes, AuthorizedHead] = {}
        self._open_block: _OpenBlock | None = None
        self._streams: dict[int, Stream] = {}
        self._last_id = 0
        self._reset_ids: deque[int] = deque(maxlen=REMEMBERED_RESETS)
        self._resets = (0, 0)  # second, and how many the client has sent in it
        self._receive_window = WINDOW
        self._send_window = frames.FIRST_WINDOW
        self._peer_stream_window = frames.FIRST_WINDOW
        self._peer_frame_bytes = frames.MAX_FRAME_BYTES
        self._is_draining = self._is_finishing = False
        self._identified: PeerCertificate | None = None  # the client's certificate, if it stands for a token
        self._end: asyncio.TimerHandle | None = None  # before that certificate's
        self._pings: dict[bytes, asyncio.Future[None]] = {}  # those that the client has not answered
        self._sent_pings = 0
        self.opened_s = 0.0
        self.peer = ""
        self.calls = 0
        self._handlers = (
            self._on_data,
            self._on_headers,
            self._on_priority,
            self._on_rst_stream,
            self._on_settings,
            self._on_push_promise,
            self._on_ping,
            self._on_goaway,
            self._on_window_update,
            self._on_continuation,
        )

    # --- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.opened_s = perf_counter()
        address = transport.get_extra_info("peername")
        self.peer = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "unix"
        self._identified = self._door.callers.identified(transport)
        self._end = call_before_end(self._identified, self.drain)
        settings = {
            frames.MAX_CONCURRENT_STREAMS: self._door.max_streams,
            frames.INITIAL_WINDOW_SIZE: self._door.stream_window,
            frames.MAX_HEADER_LIST_SIZE: self._door.max_header_bytes,
        }
        transport.write(frames.settings(settings) + frames.window_update(0, WINDOW - frames.FIRST_WINDOW))
        self._door.opened(self)

    def connection_lost(self, _: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
        for stream in list(self._streams.values()):
            self._forget(stream)
        self._door.lost(self)

    def pause_writing(self) -> None:
        """Read no more requests from a client that does not read its answers."""
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()

    @property
    def is_idle(self) -> bool:
        return not self._streams

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def drop(self, reason: str) -> None:
        self._door.limits.closed(reason)
        self.transport.abort()

    async def ping(self) -> None:
        """Wait until the client has answered a PING, and so has read all that was sent before."""
        self._sent_pings += 1
        payload, answered = self._sent_pings.to_bytes(8), asyncio.get_running_loop().create_future()
        self._pings[payload] = answered
        self.transport.write(frames.frame(frames.PING, 0, 0, payload))
        try:
            await answered
        finally:
            del self._pings[payload]

    def drop_silent(self) -> None:
        """Drop a client that reads nothing, with all that is on the way to it."""
        self._door.limits.closed(SILENT)
        reset_link(self.transport)

    def sweep(self, now_s: float, timeout_s: float) -> bool:
        """Cancel unary calls whose request does not arrive in time. Return whether the client is silent as well."""
        for stream in list(self._streams.values()):
            if stream.is_awaited and now_s - stream.began_s > timeout_s:
                self.reset(stream.id, ErrorCode.CANCEL)
        return not self._has_settings and now_s - self.opened_s > timeout_s

    def drain(self) -> None:
        """Ask the client for no more calls here, and tell streams that no more messages come."""
        self._is_draining = True
        self.transport.write(frames.goaway(frames.MAX_WINDOW, ErrorCode.NO_ERROR))
        for stream in list(self._streams.values()):
            stream.end_input()
        asyncio.get_running_loop().call_later(GOAWAY_S, self._finish)

    def _finish(self) -> None:
        """Close as soon as all calls have ended."""
        self._is_finishing = True
        if not self._streams and not self.transport.is_closing():
            self.transport.write(frames.goaway(self._last_id, ErrorCode.NO_ERROR))
            self.transport.close()

    def forget_heads(self) -> None:
        """Look at the caller of the next call again."""
        self._heads.clear()

    # --- frames -------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._unread:
            data = self._unread + data
        try:
            self._unread = self._read(data)
        except ConnectionFault as fault:
            self.transport.write(frames.goaway(self._last_id, fault.code, str(fault)))
            self.transport.close()
            self._unread = b""

    def _read(self, data: bytes) -> bytes:
        """Handle all complete frames, and return the rest."""
        at = 0
        if not self._has_preface:
            if len(data) < len(frames.PREFACE) and frames.PREFACE.startswith(data):
                return data
            if not data.startswith(frames.PREFACE):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this port serves HTTP/2 only")
            self._has_preface, at = True, len(frames.PREFACE)
        while (payload_at := at + frames.HEAD_BYTES) <= len(data):
            end = payload_at + int.from_bytes(data[at : at + 3])
            if end - payload_at > frames.MAX_FRAME_BYTES:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a frame is too large")
            if end > len(data):
                break
            stream_id = int.from_bytes(data[at + 5 : payload_at]) & frames.MAX_WINDOW
            try:
                self._on_frame(data[at + 3], data[at + 4], stream_id, data[payload_at:end])
            except StreamFault as fault:
                self.reset(fault.stream_id, fault.code)
            if self.transport.is_closing():
                return b""
            at = end
        return data[at:]

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._open_block is not None and (kind != frames.CONTINUATION or stream_id != self._open_block.stream_id):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
        if not self._has_settings and kind != frames.SETTINGS:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is no SETTINGS")
        if kind < len(self._handlers):
            self._handlers[kind](flags, stream_id, payload)

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        stream = self._streams.get(stream_id)
        if payload:
            self._receive_window -= len(payload)
            if self._receive_window < 0:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more data than the window has room for")
            if self._receive_window < WINDOW // 2:
                self.transport.write(frames.window_update(0, WINDOW - self._receive_window))
                self._receive_window = WINDOW
        if stream is None or stream.is_remote_done:
            self._refuse_stray(stream_id)
            return
        stream.receive(frames.without_padding(payload, flags), len(payload), is_last=bool(flags & frames.END_STREAM))

    def _refuse_stray(self, stream_id: int) -> None:
        """Refuse a frame of a stream that takes no more of them; late ones of streams that were reset are ignored."""
        if stream_id in self._reset_ids:
            return
        if stream_id in self._streams:
            raise StreamFault(ErrorCode.STREAM_CLOSED, stream_id)
        code = ErrorCode.PROTOCOL_ERROR if self._is_unused(stream_id) else ErrorCode.STREAM_CLOSED
        raise ConnectionFault(code, f"stream {stream_id} is not open")

    def _is_unused(self, stream_id: int) -> bool:
        """Return whether a stream was never opened. The client's have odd numbers, in order."""
        return stream_id > self._last_id or stream_id % 2 == 0

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client's streams have odd numbers")
        block = frames.without_padding(payload, flags)
        if flags & frames.HAS_PRIORITY:
            if len(block) < 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS with a part of a priority")
            if int.from_bytes(block[:4]) & frames.MAX_WINDOW == stream_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")
            block = block[5:]
        if flags & frames.END_HEADERS:
            self._on_block(stream_id, flags, block)
        else:
            self._open_block = _OpenBlock(stream_id, flags, [block])

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._open_block is None:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a CONTINUATION continues nothing")
        pieces = self._open_block.pieces
        pieces.append(payload)
        if len(pieces) > MAX_CONTINUATIONS or sum(map(len, pieces)) > self._door.max_header_bytes:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too large")
        if flags & frames.END_HEADERS:
            opened, self._open_block = self._open_block, None
            self._on_block(stream_id, opened.flags, b"".join(pieces))

    def _on_block(self, stream_id: int, flags: int, block: bytes) -> None:
        """Begin a stream, or end its request with trailers. Each block is decoded, for later ones depend on it."""
        is_last = bool(flags & frames.END_STREAM)
        stream = self._streams.get(stream_id)
        if stream is None and stream_id > self._last_id:
            self._last_id = stream_id
            self._begin(stream_id, self._find_head(stream_id, block), is_last=is_last)
            return
        trailers = self._decode(stream_id, block)
        if stream is None or stream.is_remote_done:
            self._refuse_stray(stream_id)
            return
        try:
            check_fields(trailers)
        except MalformedRequest:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, stream_id) from None
        if not is_last:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, stream_id)
        stream.receive(b"", 0, is_last=True)

    def _begin(self, stream_id: int, head: "AuthorizedHead", *, is_last: bool) -> None:
        if len(self._streams) >= self._door.max_streams:
            raise StreamFault(ErrorCode.REFUSED_STREAM, stream_id)
        self.calls += 1
        stream = Stream(self, self._door, stream_id, head, self._peer_stream_window)
        self._streams[stream_id] = stream
        stream.begin(is_last=is_last)
        if self._is_draining:
            stream.end_input()

    def _find_head(self, stream_id: int, block: bytes) -> "AuthorizedHead":
        head = self._heads.get(block)
        if head is not None and head.expires_at_s > time():
            return head
        changes = self._decoder.changes
        headers = self._decode(stream_id, block)
        try:
            head = self._door.callers.authorize(headers, self._identified)
        except MalformedRequest:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, stream_id) from None
        if self._decoder.changes != changes:
            self._heads.clear()  # the same bytes mean other headers now
        elif head.unverified is None:
            if len(self._heads) >= MAX_KNOWN_HEADS:
                self._heads.clear()
            self._heads[block] = head
        return head

    def _decode(self, stream_id: int, block: bytes) -> list[Header]:
        try:
            return self._decoder.decode(block)
        except InvalidHeaderBlock as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        except HeaderListTooLarge:
            self._heads.clear()
            raise StreamFault(ErrorCode.ENHANCE_YOUR_CALM, stream_id) from None

    def _on_priority(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY of no stream")
        if len(payload) != 5:
            raise StreamFault(ErrorCode.FRAME_SIZE_ERROR, stream_id)
        if int.from_bytes(payload[:4]) & frames.MAX_WINDOW == stream_id:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, stream_id)

    def _on_rst_stream(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM has four bytes")
        if self._is_unused(stream_id):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "RST_STREAM of a stream that was not opened")
        second, count = self._resets
        self._resets = (int(time()), count + 1 if second == int(time()) else 1)
        if count > MAX_RESETS:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many streams are reset")
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        is_ack = bool(flags & frames.ACK)
        if len(payload) % 6 or (is_ack and payload):
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong length")
        self._has_settings = True
        if is_ack:
            return
        for at in range(0, len(payload), 6):
            self._apply(int.from_bytes(payload[at : at + 2]), int.from_bytes(payload[at + 2 : at + 6]))
        self.transport.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self._flush()

    def _apply(self, name: int, value: int) -> None:
        if name == frames.ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is 0 or 1")
        if name == frames.MAX_FRAME_SIZE:
            if not frames.MAX_FRAME_BYTES <= value < 1 << 24:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of its range")
            self._peer_frame_bytes = value
        if name == frames.INITIAL_WINDOW_SIZE:
            if value > frames.MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is out of its range")
            change, self._peer_stream_window = value - self._peer_stream_window, value
            for stream in self._streams.values():
                stream.send_window += change
                if stream.send_window > frames.MAX_WINDOW:
                    raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window overflows")

    def _on_push_promise(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "clients push nothing")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING has eight bytes")
        if not flags & frames.ACK:
            self.transport.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif (answered := self._pings.get(payload)) is not None and not answered.done():
            answered.set_result(None)

    def _on_goaway(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY has eight bytes or more")

    def _on_window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE has four bytes")
        increment = int.from_bytes(payload) & frames.MAX_WINDOW
        if not stream_id:
            self._send_window += increment
            if not increment or self._send_window > frames.MAX_WINDOW:
                code = ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
                raise ConnectionFault(code, "WINDOW_UPDATE is out of its range")
        elif self._is_unused(stream_id):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of a stream that was not opened")
        elif (stream := self._streams.get(stream_id)) is not None:
            stream.send_window += increment
            if not increment or stream.send_window > frames.MAX_WINDOW:
                raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR, stream_id)
        self._flush()

    # --- output -------------------------------------------------------------------------------------------------------

    def take_whole(self, stream: Stream, size: int) -> bool:
        """Take room for so many bytes in one frame, or none."""
        if size > self._send_window or size > stream.send_window or size > self._peer_frame_bytes:
            return False
        self._send_window -= size
        stream.send_window -= size
        return True

    def take_window(self, stream: Stream, wanted: int) -> int:
        """Take room for data of a stream: at most as much as fits into both windows and one frame."""
        room = max(0, min(wanted, self._send_window, stream.send_window, self._peer_frame_bytes))
        self._send_window -= room
        stream.send_window -= room
        return room

    def _flush(self) -> None:
        """Send what waited for a window."""
        for stream in list(self._streams.values()):
            stream.flush()

    def end(self, stream: Stream) -> None:
        """End a stream that has been answered. A client that still sends its request is asked to stop."""
        if not stream.is_remote_done:
            self._reset_ids.append(stream.id)
            self.transport.write(frames.rst_stream(stream.id, ErrorCode.NO_ERROR))
        self._forget(stream)

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        self._reset_ids.append(stream_id)
        self.transport.write(frames.rst_stream(stream_id, code))
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)
        stream.cancel()
        if self._is_finishing:
            self._finish()
