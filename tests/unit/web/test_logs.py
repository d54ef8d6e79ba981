"""The log is one JSON object a line, and contains no secret."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from web.logs import blank_secrets, configure_logging

TOKEN = "lh_" + "A" * 43
Captured = pytest.CaptureFixture[bytes]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level


def _lines(captured: Captured) -> list[dict[str, Any]]:
    return [json.loads(line) for line in captured.readouterr().out.splitlines()]


def test_a_line(capsysbinary: Captured) -> None:
    configure_logging("agent", "info")
    structlog.get_logger().debug("unheard")
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.get_logger().info("heard", count=3)
    (line,) = _lines(capsysbinary)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "heard", "count": 3, "level": "info", "service": "agent", "request_id": "r1"}


def test_lines_of_libraries_have_the_same_form(capsysbinary: Captured) -> None:
    configure_logging("agent", "info")
    logging.getLogger("uvicorn.error").info("unheard")
    logging.getLogger("uvicorn.error").error("Exception in %s\n", "app")
    logging.getLogger("a.library").info("said")
    lines = _lines(capsysbinary)
    assert [(line["logger"], line["level"], line["event"]) for line in lines] == [
        ("uvicorn.error", "error", "Exception in app"),
        ("a.library", "info", "said"),
    ]


def test_a_traceback_is_one_line_without_secrets(capsysbinary: Captured) -> None:
    configure_logging("agent", "info")
    try:
        raise RuntimeError(f"cannot reach redis://:hunter2@store:6379 with {TOKEN}")
    except RuntimeError:
        structlog.get_logger().exception("failed")
    (line,) = _lines(capsysbinary)
    assert "RuntimeError: cannot reach redis://***@store:6379 with lh_***" in line["exception"]


@pytest.mark.parametrize(
    "event",
    [
        {"token": "hunter2"},
        {"Authorization": "hunter2"},
        {"store_password": "hunter2"},
        {"headers": {"cookie": "hunter2", "x-api-key": "hunter2"}},
        {"headers": [("authorization", "Bearer hunter2")]},
        {"database_url": "postgresql://owner:hunter2@db/x"},
        {"database_url": "postgresql://owner:a/b@hunter2@db/x"},
        {"url": "https://example.org/x?token=hunter2&a=1"},
        {"error": ValueError("password=hunter2")},
        {"event": "got Authorization: Bearer hunter2"},
        {"event": 'sent {"token": "hunter2"}'},
        {"raw": b"redis://:hunter2@store"},
        {"event": "signed with whsec_hunter2hunter2"},
        {"event": "signed with whsec_abcdefgh+/hunter2=="},
        {"error": ValueError("DETAIL:  Failing row contains (7, HTTP://x/, {period.closed}, hunter2, null).")},
    ],
)
def test_secrets_are_blanked(event: dict[str, Any]) -> None:
    assert "hunter2" not in str(blank_secrets(None, "info", event))


def test_other_text_is_not_blanked() -> None:
    event = {"event": "request", "route": "/v1/check", "status": 200, "ratio": 0.5, "none": None, "yes": True}
    assert blank_secrets(None, "info", dict(event)) == event


def test_text_that_cannot_be_encoded_is_still_logged(capsysbinary: Captured) -> None:
    configure_logging("agent", "info")
    structlog.get_logger().info("odd", half="\ud800", big=2**70, thing=object())
    (line,) = _lines(capsysbinary)
    assert (line["event"], line["half"], line["big"]) == ("odd", "\ud800", 2**70)


def test_a_closed_output_does_not_stop_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, _line: bytes) -> None:
            raise BrokenPipeError

    class Stdout:
        buffer = Gone()

    monkeypatch.setattr("sys.stdout", Stdout())
    configure_logging("agent", "info")
    structlog.get_logger().info("the reader is gone")
