"""Drives servers with the generator in `loadgen/`: one program for every server, over HTTP/1.1 or gRPC.

A Python client of gRPC would cost more than the servers do. The generator gets a request as bytes, in which only the
digits of the key change.
"""

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.frame import Load
from benchmarks.load import MOST_REFUSED, RefusedError
from protocol.protobuf.writing import bytes_field, choice_field

KEYS = 100_000
KEY = "key-000000"  # the generator replaces the digits
CALLERS = 64
OPEN_LOOP_CALLERS = 256  # a request that finds none of them free waits, and its wait counts


class Request(NamedTuple):
    """A request as bytes, with regular expressions of its response: over HTTP of the head, over gRPC of the message."""

    body: bytes
    accepted: str
    shows_limit: str = ""  # what a response has only under a limit, if `accepted` does not show it
    grpc_method: str = ""


class Keys(NamedTuple):
    """The keys of one run: drawn from so many, or each used once in order."""

    number: int
    first: int = 0
    walk: bool = False


def hot_key(number: int) -> Keys:
    return Keys(1, first=number)


RANDOM = Keys(KEYS)
EVERY_KEY_ONCE = Keys(KEYS, walk=True)


class Generated(NamedTuple):
    load: Load
    decisions: int
    late_p99_us: float


class Generator(NamedTuple):
    program: Path
    grpc_connections: int = 1  # calls share it; 4 and 16 were no faster

    async def run(
        self,
        address: str,
        request: Request,
        keys: Keys,
        seconds: float,
        *,
        per_second: float = 0,
        callers: int = CALLERS,
    ) -> Generated:
        """Send requests, in a closed loop or so many a second on a schedule."""
        options: dict[str, object] = {
            "target": address,
            "request": base64.b64encode(request.body).decode(),
            "accepted": request.accepted,
            "callers": callers,
            "first": keys.first,
            "keys": keys.number,
            "seconds": seconds,
            "rate": per_second,
        }
        if request.grpc_method:
            options |= {"grpc": request.grpc_method, "connections": min(self.grpc_connections, callers)}
        flags = [f"-{name}={value}" for name, value in options.items()]
        output = await _output_of(self.program, *flags, *(["-walk"] if keys.walk else []))
        return generated(output)


def generated(output: bytes) -> Generated:
    """Parse what the generator prints."""
    measured = json.loads(output)
    decisions, refused = measured["decisions"], measured["refused"]
    if not decisions or refused > MOST_REFUSED * decisions:
        raise RefusedError(f"{refused} of {decisions + refused} responses were like {measured['refusal']}")
    load = Load(measured["per_second"], measured["p50_us"], measured["p99_us"], refused)
    return Generated(load, decisions, measured["late_p99_us"])


async def _output_of(*command: str | Path) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RefusedError(complaint.decode(errors="replace").strip())
    return output


def encode_field(number: int, value: int | bytes | str | Sequence[bytes]) -> bytes:
    """Encode one field of a protobuf message: an integer, bytes, a string, or a message for each element."""
    if isinstance(value, int):
        return choice_field(number, value)
    if isinstance(value, bytes | str):
        encoded = value.encode() if isinstance(value, str) else value
        return bytes_field(number, encoded)
    return b"".join(encode_field(number, each) for each in value)
