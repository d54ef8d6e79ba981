"""redis-py opens the connections of a store, and our protocol takes them over: TLS, users, passwords and reasons."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.asyncio.connection import Connection

from leasehold.local_stack import embedded
from leasehold.local_stack.processes import stop
from protocol.circuit_breaker import BreakerState
from regional_agent.settings import AgentSettings
from regional_agent.store.address import StoreAddress
from regional_agent.store.connection import UNREACHABLE, StoreConnection
from regional_agent.store.opening import Server, StoreAccess, connect_with
from tests.certificates import Authority
from tests.conftest import Server as StoreServer
from tests.conftest import free_port
from tests.integration.regional_agent.http.test_workers import environ
from tests.integration.regional_agent.store.certificates import encrypted
from tests.integration.regional_agent.store.test_topology import PASSWORD, a_switch, spends, stores
from tests.integration.regional_agent.world import EXPORT, Agent, World, running
from tests.parts import part
from tests.waiting import BOUND_S, until
from web.settings import load_settings

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[4]
USER_PASSWORD = "p@ss/word"
ACL_LINE = re.compile(r"^    ACL SETUSER leasehold on >PASSWORD (.+)$", re.MULTILINE)


def documented_acl() -> str:
    """Return the rules of the line that the guide of stores gives."""
    [rules] = ACL_LINE.findall((ROOT / "docs" / "guides" / "stores.md").read_text())
    return str(rules)


@asynccontextmanager
async def connected(url: str, access: StoreAccess | None = None) -> AsyncIterator[StoreConnection]:
    connection = StoreConnection(Server(StoreAddress.parse(url), access or StoreAccess()), timeout_ms=5_000)
    try:
        await connection.connect()
        yield connection
    finally:
        await connection.close()


async def why_not(url: str, access: StoreAccess | None = None) -> str:
    """Return why the store cannot be reached."""
    connection = StoreConnection(Server(StoreAddress.parse(url), access or StoreAccess()), timeout_ms=5_000)
    with pytest.raises(UNREACHABLE):
        await connection.connect()
    assert not connection.connected
    return connection.fault


# --- what the transfer of a transport relies on ----------------------------------------------------------------------


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("has_tls", [False, True])
def test_a_transport_of_redis_py_works_with_our_protocol(
    store_server: StoreServer, tmp_path: Path, loop_factory: Callable[[], asyncio.AbstractEventLoop], has_tls: bool
) -> None:
    """A thousand calls are answered in order, and the end of the connection is noticed."""
    authority = Authority(tmp_path)

    async def call(url: str, access: StoreAccess) -> None:
        async with connected(url, access) as connection:
            calls = [connection.call("ECHO", str(number) * 100) for number in range(1_000)]
            assert await asyncio.gather(*calls) == [(str(number) * 100).encode() for number in range(1_000)]
            with suppress(*UNREACHABLE):
                await connection.call("QUIT")
            for _ in range(3_000):
                if not connection.connected:
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("the end of the connection was not noticed")

    async def main() -> None:
        url = f"://:{store_server.password}@{embedded.LOOPBACK}"
        if not has_tls:
            await call(f"redis{url}:{store_server.port}/3", StoreAccess())
            return
        async with encrypted(store_server.port, authority) as port:
            await call(f"rediss{url}:{port}/3", StoreAccess(ca_file=authority.file))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def test_a_connection_can_be_closed_at_any_moment_of_its_making(store: str) -> None:
    """An agent that stops while it connects would otherwise never end."""
    for turns in range(60):
        connection = StoreConnection(Server.at(store), timeout_ms=5_000)
        connection.keep()
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(connection.close(), BOUND_S)


async def test_the_fingerprint_is_our_first_command_on_a_connection(store_server: StoreServer) -> None:
    """redis-py sends AUTH and SELECT only, which any user may send."""
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            seen.append(data)
            writer.write(b"+OK\r\n" * data.count(b"*"))
        writer.transport.abort()

    server = await asyncio.start_server(answer, embedded.LOOPBACK, 0)
    port = server.sockets[0].getsockname()[1]
    await why_not(f"redis://user:secret@{embedded.LOOPBACK}:{port}/2")
    await end_of(server)
    commands = re.findall(rb"\*\d\r\n\$\d+\r\n(\w+)\r\n\$\d+\r\n(\w+)", b"".join(seen))
    assert commands[:3] == [(b"AUTH", b"user"), (b"SELECT", b"2"), (b"INFO", b"server")]


async def test_a_connection_that_ended_during_its_handshake_is_not_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our protocol would not learn of an end that came before it."""

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    connect = Connection.connect

    async def connect_late(self: Connection) -> None:
        await connect(self)  # type: ignore[no-untyped-call]
        assert self._reader is not None
        await self._reader.read()  # until its end

    server = await asyncio.start_server(end, embedded.LOOPBACK, 0)
    monkeypatch.setattr(Connection, "connect", connect_late)
    endpoint = Server.at(f"redis://{embedded.LOOPBACK}:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(UNREACHABLE, match="the store closed the connection"):
        await connect_with(await endpoint.locate(), asyncio.Protocol())
    await end_of(server)


async def end_of(server: asyncio.Server) -> None:
    """Close a server, and let the transports of both sides end."""
    server.close()
    for _ in range(20):
        await asyncio.sleep(0)


# --- TLS -------------------------------------------------------------------------------------------------------------


async def test_checks_are_decided_over_tls_with_a_client_certificate(
    world: World, store: str, store_server: StoreServer, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    cert_file, key_file = authority.issue("agent")
    async with encrypted(store_server.port, authority, asks_for_one=True) as port:
        url = f"rediss://:{store_server.password}@{embedded.LOOPBACK}:{port}/0"
        files: dict[str, Any] = {"store_ca_file": authority.file, "store_cert_file": cert_file}
        agent = await world.agent(store_url=url, store_key_file=key_file, **files)
        await spends(agent, 5)
        without = StoreAccess(ca_file=authority.file)
        assert "certificate required" in await why_not(url, without) or "Connection" in await why_not(url, without)
        await world.agents.aclose()


@pytest.mark.extended
async def test_a_store_with_tls_of_its_own_decides(world: World, tmp_path: Path) -> None:
    """Debian's Redis asks for a client certificate."""
    authority, port = Authority(tmp_path), free_port()
    (cert_file, key_file), (own_cert, own_key) = authority.issue("store"), authority.issue("agent")
    tls = f"port 0\ntls-port {port}\ntls-cert-file {cert_file}\ntls-key-file {key_file}\n"
    tls += f"tls-ca-cert-file {authority.file}\ntls-auth-clients yes\n"
    binary = part("redis") / "bin" / "redis-server"
    process = embedded.start_store(tmp_path / "data", free_port(), PASSWORD, more=tls, binary=binary)
    try:
        url = f"rediss://:{PASSWORD}@{embedded.LOOPBACK}:{port}/0"
        files: dict[str, Any] = {
            "store_ca_file": authority.file,
            "store_cert_file": own_cert,
            "store_key_file": own_key,
        }
        agent = await world.agent(store_url=url, **files)
        await spends(agent, 5)
        await world.agents.aclose()
    finally:
        stop(process)


async def test_a_certificate_that_cannot_be_verified_is_the_reason(store_server: StoreServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with encrypted(store_server.port, authority, hosts=("store.internal",)) as port:
        url = f"rediss://:{store_server.password}@{embedded.LOOPBACK}:{port}/0"
        assert "certificate verify failed" in await why_not(url)
        known = StoreAccess(ca_file=authority.file)
        assert "IP address mismatch" in await why_not(url, known)
        async with connected(url, StoreAccess(ca_file=authority.file, checks_hostname=False)) as connection:
            assert await connection.call("PING") == b"PONG"
        plain = url.replace(str(port), str(store_server.port))
        assert "did not answer in time" in await why_not(plain, known), "a plain store waits for a line"


# --- users and passwords ---------------------------------------------------------------------------------------------


async def test_the_real_reason_is_in_readyz_and_the_status(world: World, store_server: StoreServer) -> None:
    for url, reason in (
        (f"redis://:wrong@{embedded.LOOPBACK}:{store_server.port}", "invalid username-password pair"),
        (f"redis://{embedded.LOOPBACK}:{store_server.port}", "NOAUTH"),
        (f"redis://{embedded.LOOPBACK}:1", "Connect call failed"),
        ("redis://no-such-host.invalid:6379", "no-such-host.invalid"),
        ("unix:///no/such/socket", "No such file"),
    ):
        async with running(world.settings("us-east", store_url=url)) as agent:
            await until(lambda: reason in agent.region.store.fault)  # noqa: B023 - it is called at once
            ready = await agent.http.get("/readyz")
            assert (ready.status_code, reason in ready.text) == (503, True)
            assert reason in "".join((await agent.http.get("/v1/status")).json()["faults"])
            assert "wrong" not in ready.text


async def test_a_user_with_the_documented_rights_can_do_everything(world: World, tmp_path: Path) -> None:
    """The line of the guide is applied as it is written; a user with fewer rights is refused with the reason."""
    with stores(tmp_path, 1) as (port,):
        line = f"ACL SETUSER leasehold on >{USER_PASSWORD} {documented_acl()}"
        assert embedded.send_to_store(port, PASSWORD, line).startswith("+OK")
        url = f"redis://leasehold:p%40ss%2Fword@{embedded.LOOPBACK}:{port}/0"
        agent = await world.agent(store_url=url)
        await spends(agent, 5)
        await use_everything(agent)
        assert embedded.send_to_store(port, PASSWORD, "ACL LOG RESET").startswith("+OK")
        await until(lambda: not agent.region.exchange_loop.stopped_lanes)
        assert embedded.send_to_store(port, PASSWORD, "ACL LOG").startswith("*0")
        await world.agents.aclose()
        assert embedded.send_to_store(port, PASSWORD, "ACL SETUSER leasehold -fcall").startswith("+OK")
        async with running(world.settings("us-east", store_url=url)) as agent:
            await until(lambda: "permission" in str(agent.region.epochs.fault))
            assert "permission" in (await agent.http.get("/readyz")).text


async def use_everything(agent: Agent) -> None:
    """Use each kind of quota, a hold and the status."""
    for route in ("/v1/search", "/v1/open", "/v1/local"):
        assert (await agent.check({**EXPORT, "route": route})).status_code == 200
    hold = {"subject": {**EXPORT, "route": "/v1/reports"}, "units": 1, "ttl_ms": 60_000, "operation_id": "one"}
    held = await agent.http.post("/v1/holds", json=hold)
    assert held.status_code == 201
    assert (await agent.http.post(f"/v1/holds/{held.json()['hold_id']}:commit", json={"units": 1})).is_success
    status = (await agent.http.get("/v1/status")).json()
    assert (status["incomplete"], status["store_breaker"]) == (None, BreakerState.CLOSED)


async def test_a_password_file_is_read_again_at_each_connection(world: World, tmp_path: Path) -> None:
    with stores(tmp_path, 1) as (port,):
        file = tmp_path / "password"
        file.write_text(PASSWORD + "\n")
        settings = world.settings("us-east", store_url=f"redis://{embedded.LOOPBACK}:{port}/0")
        environment = environ(settings) | {"LEASEHOLD_AGENT_STORE_PASSWORD_FILE": str(file)}
        agent = await world.agents.enter_async_context(running(load_settings(AgentSettings, environment)))
        await agent.ready()
        await spends(agent, 1)
        embedded.send_to_store(port, PASSWORD, "CONFIG SET requirepass another")
        embedded.send_to_store(port, "another", "CLIENT KILL TYPE normal")
        await until(lambda: "invalid username-password pair" in agent.region.store.fault)
        file.write_text("another\n")
        await until(lambda: agent.region.store.connected)
        await spends(agent, 1)
        await world.agents.aclose()


# --- managed services ------------------------------------------------------------------------------------------------


async def test_a_store_without_config_shows_its_policy_and_is_not_exempt(world: World, tmp_path: Path) -> None:
    """A managed service has renamed CONFIG; INFO shows the policy all the same."""
    with stores(tmp_path, 1, more='rename-command CONFIG ""\nmaxmemory-policy allkeys-lru\n') as (port,):
        agent = await world.agent(store_url=embedded.store_url(port, PASSWORD))
        assert not agent.region.epochs.is_exempt
        ready = await agent.http.get("/readyz")
        assert "maxmemory-policy is allkeys-lru" in ready.text
        await world.agents.aclose()


@pytest.mark.parametrize("is_vouched_for", [True, False])
async def test_a_policy_that_the_store_hides_needs_somebody_to_vouch_for_it(
    world: World, tmp_path: Path, is_vouched_for: bool
) -> None:
    with stores(tmp_path, 1, more='rename-command CONFIG ""\n') as (port,):
        async with a_switch(port) as (switch, front):
            switch.rewrite = lambda data: data.replace(b"maxmemory_policy:", b"something_hidden:")
            url = embedded.store_url(front, PASSWORD)
            agent = await world.agent(store_url=url, store_assume_noeviction=is_vouched_for)
            ready = await agent.http.get("/readyz")
            status = (await agent.http.get("/v1/status")).json()
            if is_vouched_for:
                await spends(agent, 5)
                assert status["store_eviction"].startswith("noeviction (assumed")
            else:
                assert (ready.status_code, status["store_eviction"]) == (503, None)
                assert "no setting vouches for it" in ready.text
                assert (await agent.check(cost=5)).status_code == 503
            await world.agents.aclose()
