"""What a gRPC service is to the door: functions of messages as bytes, which know nothing of HTTP/2.

A unary method gets a message and a call, and answers the call when it can: at once, or when the store's reply arrives.
A method over a stream is a coroutine. It reads messages until the client is done or the agent shuts down, may send at
any time, and is cancelled when the client is gone.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from enum import IntEnum
from typing import NamedTuple, Protocol


class Status(IntEnum):
    """The status codes of gRPC that the door's services answer with."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class GrpcError(Exception):
    """An error that answers a call in place of a message. The text is for the people who run the client."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


class Call(Protocol):
    """A unary call. Exactly one of `respond` and `fail` is called, once; a call that was cancelled ignores both."""

    @property
    def has_disconnected(self) -> bool:
        """Return whether no answer reaches the client any more, so that no units are spent for it."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Return the request's headers, without those that HTTP/2 and gRPC define."""

    def respond(self, message: bytes) -> None: ...

    def fail(self, error: GrpcError) -> None: ...


class MessageStream(Protocol):
    """A call with a stream of messages in both directions."""

    @property
    def peer(self) -> str:
        """Return the client's address."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Return the request's headers, without those that HTTP/2 and gRPC define."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over the client's messages, until it sends no more or the agent shuts down."""

    async def send(self, message: bytes) -> None:
        """Send a message. Waits while the client takes none (flow control)."""

    async def deliver(self, message: bytes, until_s: float) -> None:
        """Send a message, and wait until the client has read it. Raises TimeoutError at that time of the event loop.

        Then the client's connection is reset, so that the message does not arrive later.
        """


UnaryMethod = Callable[[bytes, Call], None]
StreamMethod = Callable[[MessageStream], Awaitable[None]]  # raises GrpcError to end the stream with a status


class Methods(NamedTuple):
    """The methods of all services by path, such as `/grpc.health.v1.Health/Check`."""

    unary: Mapping[str, UnaryMethod]
    streams: Mapping[str, StreamMethod]
