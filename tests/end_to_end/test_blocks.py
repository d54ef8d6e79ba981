"""A key is blocked in every region of a running stack."""

import os
import signal
from collections.abc import Mapping
from functools import partial

import pytest

from leasehold.local_stack.calls import HttpReply, call
from leasehold.local_stack.plan import REGIONS
from leasehold.local_stack.processes import wait_until
from tests.end_to_end.launching import PATIENCE_S, SHARED, Launcher

KEY = {"field": "api_key", "value": "ak_7"}
ASKED = {"tenant": "blocked", "api_key": "ak_7", "route": "/v1/exports", "method": "POST"}
OTHER = ASKED | {"api_key": "ak_8"}


pytestmark = pytest.mark.xdist_group(SHARED)


def test_a_key_is_blocked_in_every_region_and_let_in_again(stack: Launcher) -> None:
    assert {region: check(stack, region).status for region in REGIONS} == dict.fromkeys(REGIONS, 200)
    assert change(stack, "POST", "/v1/blocks", KEY | {"reason": "leaked"}).status == 201
    for region in REGIONS:
        assert wait_until(partial(is_blocked, stack, region), PATIENCE_S)
    assert check(stack, "us-east", OTHER).status == 200, "others are not concerned"
    os.kill(stack.stack["pids"]["coordinator"], signal.SIGSTOP)
    try:
        assert all(is_blocked(stack, region) for region in REGIONS), "it needs no coordinator"
    finally:
        os.kill(stack.stack["pids"]["coordinator"], signal.SIGCONT)
    assert change(stack, "DELETE", "/v1/blocks/api_key/ak_7").status == 204
    for region in REGIONS:
        assert wait_until(partial(is_let_in, stack, region), PATIENCE_S)


def check(launcher: Launcher, region: str, subject: Mapping[str, str] = ASKED) -> HttpReply:
    return call("POST", f"{launcher.stack['agents'][region]}/v1/check", body={"subject": subject})


def is_blocked(launcher: Launcher, region: str) -> bool:
    answer = check(launcher, region)
    return answer.status == 429 and answer.body["type"] == "/problems/blocked"


def is_let_in(launcher: Launcher, region: str) -> bool:
    return check(launcher, region).status == 200


def change(launcher: Launcher, method: str, path: str, body: object = None) -> HttpReply:
    """Call the coordinator with a token that may change limits."""
    token = launcher.stack["tokens"]["quota:write"]
    return call(method, f"{launcher.stack['coordinator']}{path}", token=token, body=body)
