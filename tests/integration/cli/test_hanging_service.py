"""A command that waited in vain says why the service is not ready."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from leasehold.cli import api
from leasehold.cli.app import app

REASON = {"code": "database_unavailable", "since": "2026-11-20T16:17:50Z", "text": "Postgres does not answer"}


@pytest.fixture
def hanging() -> Iterator[str]:
    """Serve `/readyz`, and answer nothing else."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/readyz":
                ended.wait()
                return
            body = json.dumps({"status": "not_ready", "reasons": [REASON]}).encode()
            self.send_response(503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        ended.set()
        server.shutdown()


def test_a_command_says_why_the_coordinator_hangs(hanging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(api, "READY_TIMEOUT_S", 60)
    done = CliRunner(env={"LEASEHOLD_TOKEN": "t", "LEASEHOLD_URL": hanging}).invoke(app, ["usage"])
    assert done.exit_code == 1
    assert "does not answer" in done.stderr
    assert "(database_unavailable: Postgres does not answer)" in done.stderr
