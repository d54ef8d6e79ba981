"""The OpenAPI document is true for calls of any shape that it allows, with the token of each scope.

By default few calls are tried; LEASEHOLD_FUZZ_EXAMPLES is the number of calls of each operation.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
import requests
from fastapi import FastAPI
from structlog.testing import capture_logs

from coordinator.access.issue_token import issue_token
from coordinator.access.rules.scopes import SCOPES
from coordinator.openapi import document
from tests.budget import is_full
from tests.integration.coordinator.admin_harness import AdminHarness
from tests.integration.coordinator.fixtures import served
from tests.integration.coordinator.usage.test_statements import region
from tests.integration.openapi_calls import EXAMPLES, call_in_any_shape, operations_of

__all__ = ["region"]
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.usefixtures("region"),
    # The coordinator runs in the process of the strategies and uses random numbers of its own.
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
]

PATHS: dict[str, dict[str, Any]] = msgspec.json.decode(document())["paths"]
OPERATIONS = [f"{method.upper()} {path}" for path in PATHS for method in PATHS[path] if path.startswith("/v1/")]
REGION = "region:eu-west"
CLOSED = (401, 403)
# Streams and long polls, which answer late or never end, have tests of their own.
WAITS = {"GET /v1/regions/{region}/signals", "GET /v1/policies", "GET /v1/blocks", "GET /v1/resets"}
SHOWN_TO_WHO_ADJUSTS = {
    f"GET /v1/{each}"
    for each in ("adjustments", "adjustments/{adjustment}", "suspense", "suspense/bulk/{bulk}", "quarantine", "lanes")
}
ADJUSTS = ["usage:read", "adjust:propose", "adjust:approve", "admin"]


async def test_calls_of_any_shape_are_answered_as_documented(admin_harness: AdminHarness) -> None:
    scopes = (*SCOPES, REGION)
    tokens = {
        scope: (await issue_token(admin_harness.owner, [scope], "", admin_harness.clock.now())).token
        for scope in scopes
    }
    coordinator = admin_harness.transport.app
    assert isinstance(coordinator, FastAPI)
    with capture_logs():
        async with served(coordinator) as url:
            asked = await asyncio.to_thread(lambda: Fuzz(url, tokens).everything())
    assert sorted(asked) == sorted(OPERATIONS)


def _some(callers: list[Any]) -> list[Any]:
    """Return whose calls have any shape: of all callers in a full run, of one in a short one. All are probed."""
    return callers if is_full() else callers[:1]


class Fuzz:
    def __init__(self, url: str, tokens: Mapping[str, str]) -> None:
        self._url, self._tokens = url, tokens
        self._session = requests.Session()
        self._session.trust_env = False

    def everything(self) -> list[str]:
        return [self._operation(each) for each in operations_of(document())]

    def _operation(self, operation: Any) -> str:
        name = f"{operation.method.upper()} {operation.path}"
        opens = [scope for scope in self._tokens if self._probe(operation, scope) not in CLOSED]
        assert opens == ADJUSTS if name in SHOWN_TO_WHO_ADJUSTS else self._is_one_scopes(opens), (name, opens)
        for scope in _some(opens) if name not in WAITS else ():
            self._try(operation, scope, must_be_closed=False)
        for other in _some([*self._others(opens)]):
            self._try(operation, other, must_be_closed=True)
        return name

    def _others(self, opens: list[str]) -> Iterator[str | None]:
        """Return some callers, since all would be too many calls: the one with most reads, one with changes, and one
        without token.
        """
        yield from [each for each in ("audit:read", "usage:read", "quota:write", REGION) if each not in opens][:2]
        yield None

    def _is_one_scopes(self, opens: list[str]) -> bool:
        of_people = [scope for scope in opens if scope != REGION]
        one, two = [opens[0], "admin"], ["quota:read", "alloc:write", "admin"]
        return opens == [REGION] or of_people in [one, two, ["admin"]]

    def _probe(self, operation: Any, scope: str) -> int:
        """Check that a call is refused for its token before anything is parsed, or not at all."""
        path = re.sub(r"\{\w+\}", "1", operation.path.replace("{region}", "eu-west"))
        headers = self._headers(scope)
        with self._session.request(
            operation.method, self._url + path, headers=headers, json={}, timeout=30, stream=True
        ) as answer:
            return answer.status_code

    def _headers(self, scope: str | None) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._tokens[scope]}"} if scope else {"Authorization": ""}

    def _try(self, operation: Any, scope: str | None, *, must_be_closed: bool) -> None:
        def check(answer: requests.Response) -> None:
            assert not must_be_closed or answer.status_code in CLOSED, (operation.label, scope, answer.status_code)

        call_in_any_shape(
            operation,
            self._url,
            self._session,
            headers=self._headers(scope),
            examples=1 if must_be_closed else EXAMPLES,
            check=check,
        )
