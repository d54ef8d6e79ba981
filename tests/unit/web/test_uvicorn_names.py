"""The names of uvicorn that the protocol classes of the services use, which uvicorn does not document.

The upper bound of its version in pyproject.toml keeps them; this test names what an upgrade has to be compared with.
"""

import asyncio
from importlib.metadata import requires, version
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

METHODS = (
    "connection_made",
    "connection_lost",
    "data_received",
    "on_message_begin",
    "on_url",
    "on_header",
    "on_headers_complete",
    "on_message_complete",
    "on_response_complete",
    "resume_writing",
    "send_400_response",
    "shutdown",
    "timeout_keep_alive_handler",
)


async def nothing(_scope: Any, _receive: Any, _send: Any) -> None:
    """Serve nothing."""


@pytest.mark.anyio
async def test_a_connection_has_what_its_subclasses_use() -> None:
    config = Config(nothing, http=HttpToolsProtocol, log_config=None, interface="asgi3")
    config.load()
    state = ServerState()
    connection = HttpToolsProtocol(config=config, server_state=state, app_state={})
    for method in METHODS:
        assert callable(getattr(connection, method)), method
    assert connection.cycle is None
    assert connection.timeout_keep_alive_task is None
    assert connection.timeout_keep_alive == config.timeout_keep_alive
    assert connection.loop is asyncio.get_running_loop()
    assert connection.server_state is state
    assert (state.total_requests, state.default_headers) == (0, [])
    assert STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"
    flow = FlowControl.__init__.__code__.co_names
    assert {"read_paused", "write_paused"} <= set(flow)
    assert {"pause_reading", "resume_reading"} <= set(dir(FlowControl))
    cycle = RequestResponseCycle.__init__.__code__.co_names
    assert {"disconnected", "keep_alive", "more_body", "response_started", "response_complete", "message_event"} <= set(
        cycle
    )


def test_the_version_of_uvicorn_has_an_upper_bound() -> None:
    required = [Requirement(text) for text in requires("leasehold") or []]
    bounds = [each.specifier for each in required if each.name == "uvicorn"]
    assert bounds
    for specifier in bounds:
        assert any(each.operator in ("<", "~=", "==") for each in specifier), specifier
        assert specifier.contains(Version(version("uvicorn")))
