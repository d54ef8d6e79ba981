"""The guide for operators keeps its promises on a whole stack under load, through commands alone."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from leasehold.local_stack.calls import call
from leasehold.local_stack.processes import wait_until
from tests.end_to_end.launching import AN_EXPORT, PATIENCE_S, Launcher, running

EXPORTS = "exports:tenant=acme"
LEASED, MOVED = 500, 300
MOST_CHECKS = (LEASED - MOVED) // 2  # the rest covers what the region keeps for its demand


def typed(launcher: Launcher, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {"LEASEHOLD_URL": launcher.stack["coordinator"], "LEASEHOLD_TOKEN": launcher.stack["tokens"]["admin"]}
    command = [sys.executable, "-m", "leasehold.cli", *words]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def said(launcher: Launcher, *words: str) -> Any:
    done = typed(launcher, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextmanager
def load(launcher: Launcher, region: str) -> Iterator[Counter[int]]:
    """Send checks of a service. On a busy machine commands are slow: checks stop before they spend what is to move."""
    answers, stop = Counter[int](), threading.Event()

    def ask() -> None:
        while answers.total() < MOST_CHECKS and not stop.wait(0.1):
            answers[launcher.check(region).status] += 1

    services = [threading.Thread(target=ask) for _ in range(2)]
    for service in services:
        service.start()
    try:
        assert wait_until(lambda: answers[200] > 3, PATIENCE_S)
        yield answers
    finally:
        stop.set()
        for service in services:
            service.join()


def held(launcher: Launcher) -> dict[str, int]:
    [found] = said(launcher, "allocations", "--quota", EXPORTS)
    return {each["region"]: each["outstanding"] for each in found["regions"]}


def word(launcher: Launcher) -> tuple[str, int]:
    [period] = launcher.read("/v1/periods")["data"]
    found = launcher.read(f"/v1/periods/{period['id']}/reconciliation")
    return found["status"], found["drift"]


def lease(launcher: Launcher, region: str, units: int) -> None:

    peek = call(
        "POST", f"{launcher.stack['agents'][region]}/v1/check", body=AN_EXPORT | {"cost": units, "mode": "peek"}
    )
    assert peek.status == 200, peek


@pytest.mark.extended
def test_300_units_are_moved_and_a_region_is_drained_under_load(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--json") as launcher:
        lease(launcher, "us-east", LEASED)
        said(launcher, "rebalance", "weigh", EXPORTS, f"ap-south.floor={MOVED}", "--yes")  # it must stay there
        with load(launcher, "us-east") as answers:
            move = ("rebalance", "move", EXPORTS, str(MOVED), "--from", "us-east", "--to", "ap-south")
            planned = said(launcher, *move, "--dry-run")
            done = said(launcher, *move, "--yes")
        assert planned["plan"]["cannot"] == []
        assert done["state"] == "done"
        assert done["progress"] == {"recalled": MOVED, "returned": MOVED, "regranted": MOVED}
        assert done["plan"]["moves"] == planned["plan"]["moves"]
        assert set(answers) == {200}
        assert held(launcher)["ap-south"] >= MOVED
        assert word(launcher) == ("balanced", 0)

        with load(launcher, "ap-south") as answers:
            drained = said(launcher, "rebalance", "drain", "ap-south", "--yes")
            assert (drained["state"], drained["reason"]) == ("done", None)
        assert held(launcher)["ap-south"] == 0
        assert launcher.check("ap-south").status == 429
        assert launcher.check("eu-west").status == 200
        assert said(launcher, "rebalance", "restore", "ap-south", "--yes")["state"] == "done"
        assert wait_until(lambda: launcher.check("ap-south").status == 200, PATIENCE_S)
        assert word(launcher) == ("balanced", 0)
