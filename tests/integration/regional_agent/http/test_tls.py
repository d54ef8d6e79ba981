"""An agent serves checks over TLS as it does without: the fast path, the clients and the command line."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from leasehold import AgentUnavailable, AsyncClient
from regional_agent.http.fast_path import FastPath, fast_protocol
from regional_agent.main import create_app
from tests.certificates import Authority
from tests.integration.cli.test_command_line import leasehold
from tests.integration.regional_agent.world import EXPORT, World
from tests.integration.web.conftest import Raw, serving
from tests.waiting import until
from web.tls import context as context_module
from web.tls.context import TlsFiles, client_context

pytestmark = pytest.mark.anyio

HEAD = b"POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PEEK = json.dumps({"subject": EXPORT, "mode": "peek"}).encode()


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the event loop of the services, whose transports are not asyncio's."""
    return "asyncio", {"use_uvloop": True}


@dataclass
class Door:
    """An agent that serves over TLS, and the files of a client that it accepts."""

    address: str
    authority: Authority
    files: TlsFiles
    fast_path: FastPath

    @asynccontextmanager
    async def connected(self, files: TlsFiles | None = None) -> AsyncIterator[Raw]:
        host, _, port = self.address.removeprefix("https://").rpartition(":")
        raw = Raw(*await asyncio.open_connection(host, int(port), ssl=client_context(files or self.files)))
        try:
            yield raw
        finally:
            await raw.close()


@pytest.fixture
async def door(world: World, tmp_path: Path) -> AsyncIterator[Door]:
    async with a_door(world, tmp_path) as door:
        yield door


@asynccontextmanager
async def a_door(world: World, directory: Path, **settings: str) -> AsyncIterator[Door]:
    authority = Authority(directory)
    ca_file, cert_file, key_file = authority.files("agent")
    files = {"tls_client_ca_file": ca_file, "tls_cert_file": cert_file, "tls_key_file": key_file}
    app = create_app(world.settings("us-east", **files, **settings))
    region, fast_path = app.state.region, app.state.fast_path
    async with serving(app, protocol=fast_protocol(fast_path), tls=region.tls.http) as address:
        await until(lambda: region.has_epochs and region.admission.policies is not None)
        yield Door(address, authority, authority.files("service", hosts=()), fast_path)


async def test_checks_are_decided_by_the_fast_path_in_their_order(door: Door) -> None:
    """A hundred in one piece, which TLS cuts into records, and one byte by byte."""
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(PEEK) + PEEK
    async with door.connected() as raw:
        await raw.send(request * 100)
        assert [(await raw.answer()).status for _ in range(100)] == [200] * 100
        for byte in request:
            await raw.send(bytes([byte]))
        answer = await raw.answer()
        assert json.loads(answer.body)["allowed"]
    assert door.fast_path.heads, "FastAPI answered"


async def test_a_large_answer_and_a_refusal_come_whole(door: Door) -> None:
    async with door.connected() as raw:
        batch = json.dumps({"checks": [{"subject": EXPORT, "mode": "peek"}] * 200}).encode()
        head = HEAD.replace(b"/v1/check ", b"/v1/check:batch ")
        await raw.send(head + b"Content-Length: %d\r\n\r\n" % len(batch) + batch)
        assert len(json.loads((await raw.answer()).body)["items"]) == 200
        await raw.send(HEAD + b"Content-Length: 1\r\n\r\n{")
        assert (await raw.answer()).status == 400


async def test_the_client_follows_its_files(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that lives longer than its certificate needs neither a new client nor a restart."""
    monkeypatch.setattr(context_module, "REREAD_S", 0)
    cert_file, key_file = door.authority.issue("service")
    good = cert_file.read_bytes(), key_file.read_bytes()
    other = Authority(door.authority.directory / "..", "other")
    for file, content in zip((cert_file, key_file), (path.read_bytes() for path in other.issue("bad")), strict=True):
        file.write_bytes(content)
    certificate = cert_file, key_file
    async with AsyncClient(
        door.address, on_failure="raise", ca_file=door.authority.file, certificate=certificate
    ) as client:
        with pytest.raises(AgentUnavailable):
            await client.check(EXPORT)
        cert_file.write_bytes(good[0])
        key_file.write_bytes(good[1])
        assert (await client.check(EXPORT)).allowed


async def test_the_command_line_shows_its_certificate(door: Door) -> None:
    names = ("LEASEHOLD_CA_FILE", "LEASEHOLD_CERT_FILE", "LEASEHOLD_KEY_FILE")
    files = {name: str(path) for name, path in zip(names, door.files, strict=True)}
    command = ("check", "tenant=acme", "route=/v1/exports", "method=POST")
    done = await asyncio.to_thread(leasehold, *command, LEASEHOLD_AGENT_URL=door.address, **files)
    assert done.exit_code == 0
    assert "allowed" in done.stdout.splitlines()  # beside what the agent of this process logs
    for given, reason in (
        ({}, "its certificate is not signed by a trusted authority"),
        ({"LEASEHOLD_CA_FILE": files["LEASEHOLD_CA_FILE"]}, "the server requires a client certificate"),
        ({"LEASEHOLD_CA_FILE": "/no/such/file"}, "/no/such/file: No such file or directory"),
    ):
        done = await asyncio.to_thread(leasehold, *command, LEASEHOLD_AGENT_URL=door.address, **given)
        assert done.exit_code == 1
        assert reason in done.stderr


async def test_a_client_of_another_kind_is_verified(door: Door) -> None:
    context = ssl.create_default_context(cafile=door.authority.file)
    host, _, port = door.address.removeprefix("https://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    writer.write(HEAD)
    with pytest.raises(ssl.SSLError, match="certificate required"):
        await reader.read()
    writer.close()
