"""What a replay says that a tighter document denies of logged checks, this document denies of the same checks."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from leasehold.cli.app import app
from tests.integration.regional_agent.decision_log.test_decisions import logged
from tests.integration.regional_agent.world import Agent, World
from tests.waiting import until

pytestmark = pytest.mark.anyio

SEARCH = {"route": "/v1/search", "method": "GET", "api_key": "ak_7"}


def document(quota: str, limit: str, key_limit: str) -> dict[str, Any]:
    """Return a document that limits tenants and API keys. A new name of a quota begins without any use."""
    return {
        "decisions": {"admissions": "100%"},
        "quotas": [
            {"name": quota, "kind": "rate", "limit": limit, "sharing": "regional"},
            {"name": f"{quota}-keys", "kind": "rate", "limit": key_limit, "sharing": "regional"},
        ],
        "policies": [
            {"name": "search", "quota": quota, "by": ["tenant"]},
            {"name": "key", "quota": f"{quota}-keys", "by": ["api_key"]},
        ],
    }


WIDE = document("wide", "3000/hour, burst 3000", "3000/hour, burst 3000")
TIGHT = document("tight", "3/hour, burst 30", "3/hour, burst 60")  # a region of three has ten, and twenty for a key


async def test_a_replay_says_what_the_document_then_denies(world: World, tmp_path: Path) -> None:
    await put(world, WIDE)
    east, west = await world.agent("us-east"), await world.agent("eu-west")
    assert await denied_of_traffic(east, west) == {"acme": 0, "bcme": 0}
    await logged(world, lambda rows: len(rows) == 48)
    file = tmp_path / "limits.json"
    file.write_text(json.dumps(TIGHT))
    apply = "apply", "-f", str(file), "--dry-run", "--against-traffic", "1h"
    printed = await command(world, *apply)
    assert "Of 33 acme's checks at least 45.5% would be denied; 0% were." in printed
    assert "Of 15 bcme's checks at least 26.7% would be denied; 0% were." in printed
    replay = json.loads(await command(world, *apply, "--json"))["traffic"]
    assert {each["tenant"]: each["would_deny"]["checks"] for each in replay["tenants"]} == {"acme": 15, "bcme": 4}
    of_acme = {each["policy"]: each["would_deny"]["checks"] for each in replay["tenants"][0]["policies"]}
    assert of_acme == {"search": 15, "key": 12}  # of the key's 39 in the east 19, and acme has 25 of these
    await put(world, TIGHT)
    for agent in (east, west):
        await until(lambda agent=agent: agent.whole.admission.policies.quotas == {"tight", "tight-keys"})  # type: ignore[misc]
    assert await denied_of_traffic(east, west) == {"acme": 15, "bcme": 4}
    version = (await world.admin.get("/v1/limits")).json()["version"]
    assert "acme's checks at least 45.5%" in await command(world, "quota", "replay", str(version), "--tenant", "acme")


async def put(world: World, limits: dict[str, Any]) -> None:
    answer = await world.admin.put("/v1/limits", json=limits)
    assert answer.is_success, answer.text


async def denied_of_traffic(east: Agent, west: Agent) -> dict[str, int]:
    """Send the same checks, and return how many of each tenant's are denied."""
    denied = {"acme": 0, "bcme": 0}
    for agent, tenant, number in ((east, "acme", 25), (west, "acme", 8), (east, "bcme", 14), (west, "bcme", 1)):
        for _ in range(number):
            denied[tenant] += (await agent.check({"tenant": tenant, **SEARCH})).status_code == 429
    return denied


async def command(world: World, *words: str) -> str:
    """Run a command in a thread, because the coordinator runs in this loop."""
    environment = {"LEASEHOLD_URL": world.url, "LEASEHOLD_TOKEN": world.tokens["admin"], "COLUMNS": "250"}
    with capture_logs():
        done = await asyncio.to_thread(CliRunner().invoke, app, list(words), env=environment)
    assert done.exit_code == 0, done.output
    return done.stdout
