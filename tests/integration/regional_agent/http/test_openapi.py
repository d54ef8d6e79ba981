"""The agent's OpenAPI document is true with the service token, with another one and without any."""

import asyncio

import pytest
import requests
from structlog.testing import capture_logs

from regional_agent.openapi import document
from tests.integration.openapi_calls import call_in_any_shape, operations_of
from tests.integration.regional_agent.http.test_fast_path import opened
from tests.integration.regional_agent.world import World

pytestmark = [
    pytest.mark.anyio,
    # The agent runs in the process of the strategies and uses random numbers of its own.
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
]
TOKEN = "a-token-of-the-services"


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


def call_everything(url: str) -> int:
    session = requests.Session()
    session.trust_env = False
    operations = operations_of(document())
    for operation in operations:
        call_in_any_shape(operation, url, session, headers={"Authorization": f"Bearer {TOKEN}"}, examples=10)
        for authorization in ("", "Bearer another-token-of-services"):
            headers = {"Authorization": authorization}
            call_in_any_shape(operation, url, session, headers=headers, examples=1, check=is_refused)
    return len(operations)


def is_refused(answer: requests.Response) -> None:
    assert answer.status_code == 401, answer.text


async def test_calls_of_any_shape_are_answered_as_documented(world: World) -> None:
    async with opened(world, service_token=TOKEN) as doors:
        with capture_logs():
            called = await asyncio.to_thread(call_everything, doors.address)
        assert called == 9
        assert (await doors.agent.http.get("/healthz")).status_code == 200
