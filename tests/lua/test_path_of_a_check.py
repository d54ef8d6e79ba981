"""The way of a warm check from bytes to bytes, on a real store: how many functions and files a reader follows."""

import asyncio
import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from protocol.clock import SystemClock
from protocol.limits.document import LimitsDocument, PolicyBundle
from regional_agent.http.callers import CallerRules
from regional_agent.http.fast_path import FastPath, FastProtocol, fast_protocol
from regional_agent.store.connection import StoreConnection
from regional_agent.store.types import StoreIncarnation
from tests.simulation.test_slices import Agent
from web.connections import ConnectionLimits
from web.http_protocol import bounded_protocol
from web.metrics import HttpMetrics

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
MOST_FUNCTIONS, MOST_FILES = 45, 18
BODY = b'{"subject": {"tenant": "acme", "route": "/v1/search"}}'
HEAD = b"POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
REQUEST = HEAD % len(BODY) + BODY
DOCUMENT = {
    "quotas": [{"name": "api", "kind": "rate", "limit": "1000/second"}],
    "policies": [{"name": "search", "quota": "api", "by": ["tenant"]}],
}


class Recorder(asyncio.Transport):
    """A socket that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: there is no socket."""

    def write(self, data: Any) -> None:
        self.answer.set_result(bytes(data))


class Walk:
    """The functions of this project that were entered, comprehensions aside."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        ours = [path.is_relative_to(ROOT / folder) for folder in ("regional_agent", "web", "protocol")]
        if event == "call" and any(ours) and not code.co_name.startswith("<"):
            self.functions.add((code.co_filename, code.co_qualname))

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}


async def nothing_is_handed_on(_scope: Any, _receive: Any, _send: Any) -> None:
    raise AssertionError("the fast path answers this request")


def opened(agent: Agent) -> FastProtocol:
    settings: Any = SimpleNamespace(
        service_token=None,
        adjust_token=None,
        service_identities="",
        adjust_identities="",
        uds=None,
        host="localhost",
    )
    path = FastPath(
        agent.admission, HttpMetrics(agent.metrics.registry), max_body_bytes=1_000, callers=CallerRules(settings)
    )
    protocol: Any = bounded_protocol(16_384, ConnectionLimits(), fast_protocol(path))
    config = Config(nothing_is_handed_on, http=protocol, log_config=None)
    config.load()
    connection: FastProtocol = protocol(config=config, server_state=ServerState(), app_state={})
    return connection


async def test_a_warm_check_passes_few_functions_and_files(
    connection: StoreConnection, incarnation: StoreIncarnation
) -> None:
    bundle = PolicyBundle(
        version=1, document=msgspec.convert(DOCUMENT, LimitsDocument), subscriptions={}, weight=1, total_weight=3
    )
    region: Any = SimpleNamespace(clock=SystemClock(), bundle=bundle)
    store: Any = connection
    http, walk = opened(Agent(region, store, incarnation)), Walk()
    http.connection_made(Recorder())
    for is_walked in (False, False, False, True):  # the first ones fill the caches
        http.transport = transport = Recorder()
        sys.setprofile(walk if is_walked else None)
        http.data_received(REQUEST)
        answer = await asyncio.wait_for(transport.answer, 30)
        sys.setprofile(None)
        assert answer.startswith(b"HTTP/1.1 200")
    names = "\n".join(f"{Path(file).relative_to(ROOT)} {name}" for file, name in sorted(walk.functions))
    assert len(walk.functions) <= MOST_FUNCTIONS, names
    assert len(walk.files) <= MOST_FILES, names
    assert len(walk.functions) > 30, "the walk was recorded"
    http.connection_lost(None)
