"""An agent examines its real store, and its status shows the results; the doctor examines a store by its address."""

from pathlib import Path
from typing import Any

import pytest

from leasehold.local_stack import embedded
from protocol.clock import SystemClock
from protocol.diagnosis.checks import CheckResult
from regional_agent.diagnosis.gather import examine_store
from regional_agent.diagnosis.rules import STORE_CHECKS
from regional_agent.store.address import StoreAddress
from regional_agent.store.opening import StoreAccess
from tests.conftest import Server, free_port
from tests.integration.regional_agent.world import World

pytestmark = pytest.mark.anyio


async def examined(url: str) -> dict[str, CheckResult]:
    found = await examine_store(StoreAddress.parse(url), StoreAccess(), SystemClock())
    return {each.check: each for each in found}


def send(server: Server, command: str) -> None:
    assert embedded.send_to_store(server.port, server.password, command).startswith("+OK"), command


async def test_a_store_is_examined_by_its_address_and_its_writes_are_measured(store: str, store_server: Server) -> None:
    found = await examined(store)
    assert set(found) == {each.code for each in STORE_CHECKS}
    assert found["store_eviction"].state.value == "ok"
    assert found["store_clock"].state.value == "ok"
    assert "99 of 100 decisions take at most" in found["store_timeout"].found
    assert {each.subject for each in found.values()} == {f"store 127.0.0.1:{store_server.port}/0"}
    send(store_server, "CONFIG SET maxmemory-policy allkeys-lru")
    try:
        assert (await examined(store))["store_eviction"].state.value == "failed"
    finally:
        send(store_server, "CONFIG SET maxmemory-policy noeviction")


async def test_without_config_durability_is_unknown_with_the_reason(store: str, store_server: Server) -> None:
    send(store_server, "ACL SETUSER managed on >secret ~lh:* +@connection +@write +info +time")
    try:
        found = await examined(f"redis://managed:secret@127.0.0.1:{store_server.port}/0")
    finally:
        embedded.send_to_store(store_server.port, store_server.password, "ACL DELUSER managed")
    assert found["store_eviction"].state.value == "ok"  # INFO shows it
    if found["store_durability"].state.value != "warning":  # with appendonly no, CONFIG is not needed to warn
        assert found["store_durability"].state.value == "unknown"
        assert "CONFIG is not available" in found["store_durability"].found


async def test_a_store_that_cannot_be_reached_leaves_its_checks_unknown() -> None:
    found = await examined(f"redis://127.0.0.1:{free_port()}/0")
    assert {each.state.value for each in found.values()} == {"unknown"}
    assert all("connect" in each.found.lower() for each in found.values())


async def test_the_status_of_an_agent_has_its_checks(world: World, tmp_path: Path) -> None:
    agent = await world.agent(state_dir=tmp_path, decision_timeout_ms=1, decision_timeout_max_ms=60_000)
    before: dict[str, Any] = (await agent.http.get("/v1/status")).json()
    assert (before["checked_at"], before["checks"]) == (None, [])
    for _ in range(10):
        await agent.check()
    await agent.whole.diagnosis.look()
    status = (await agent.http.get("/v1/status")).json()
    assert status["checked_at"]
    found = {each["check"]: each for each in status["checks"]}
    assert found["agent_state_dir"]["state"] == "ok"
    assert found["agent_journal"]["state"] == "ok"
    assert found["agent_coordinator_tls"]["found"] == "on this machine"
    assert found["agent_exchange_time"]["state"] == "ok"
    assert found["store_timeout"]["state"] in ("ok", "warning")  # how fast the store is depends on the machine
    assert found["store_eviction"]["subject"].startswith("store ")
