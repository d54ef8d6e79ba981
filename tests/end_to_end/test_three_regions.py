"""The commands of docs/guides/three-regions.md, typed into one shell, lead to an installation that works."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import randrange
from tempfile import TemporaryDirectory

import pytest

from tests.chaos.network.alerts import SHIPPED, quickened
from tests.end_to_end.test_documents import THREE_REGIONS, TLS, examples
from tests.parts import part

MARK = "=== block"
TIME_S = 600
# A busy machine is no fault of a store.
PATIENT = {
    f"LEASEHOLD_AGENT_{name}_MS": "5000" for name in ("DECISION_TIMEOUT", "DECISION_TIMEOUT_MAX", "STORE_TIMEOUT")
}

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(os.geteuid() != 0, reason="the guide is for root, who may run PostgreSQL as its user"),
]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield a directory that the user of PostgreSQL may pass, as pytest's own is not."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_the_guide_leads_from_the_first_certificate_to_the_first_alert(directory: Path) -> None:
    done = typed(script(free_ports()), directory)
    said: list[str] = re.findall(rf"^{MARK} \d+$\n(.*?)(?=^{MARK}|\Z)", done, re.MULTILINE | re.DOTALL)

    def block(command: str) -> str:
        """Return what the block with a command has printed."""
        [found] = (text for block, text in zip(blocks(), said, strict=True) if command in block)
        return found

    assert ", 0 failed," in block("leasehold doctor --problems").splitlines()[-1]
    assert "LeaseholdCoordinatorDown" in re.findall(r'alertname="(\w+)"', block("LeaseholdCoordinatorDown"))
    assert block("leasehold verify --database").count("intact: every row is as it was booked") == 2


def blocks() -> list[str]:
    """Return the commands of the guide, with those of another guide that it refers to."""
    own, authority = examples(THREE_REGIONS), examples(TLS)
    at = next(number for number, block in enumerate(own) if block.startswith("issue "))
    return [*own[:at], *authority, *own[at:]]


def script(base: int) -> str:
    """Return all commands with ports of this test, and with a second in place of Prometheus's quarter of a minute."""
    text = "\n".join(f'echo "{MARK} {number}"\n{until_healthy(block)}' for number, block in enumerate(blocks()))
    return re.sub(r"\b210(\d\d)\b", lambda found: str(base + int(found[1])), text).replace("15s", "1s")


def until_healthy(block: str) -> str:
    """Return a block whose doctor is asked until nothing fails: it finds the disk of a busy machine too slow."""
    if "leasehold doctor --problems" not in block:
        return block
    before, variable, command = block.partition("LEASEHOLD_AGENT_SERVICE_TOKEN_FILE=")
    return f"{before}until {variable}{command.rstrip()}; do sleep 2; done"


def typed(commands: str, directory: Path) -> str:
    """Return what the commands have printed. Processes that they leave behind end as well."""
    clone = directory / "clone"
    alerts = clone / SHIPPED.relative_to(SHIPPED.parents[2])
    alerts.parent.mkdir(parents=True)
    alerts.write_text(quickened(SHIPPED.read_text(encoding="utf-8")), encoding="utf-8")
    programs = [Path(sys.executable).parent, part("redis") / "bin", part("prometheus") / "bin"]
    part("postgresql")
    path = ":".join([*map(str, programs), os.environ["PATH"]])
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LEASEHOLD_", "COLUMNS"))}
    work, log = directory / "work", directory / "log"
    work.mkdir(mode=0o755)
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-eu", "-o", "pipefail", "-c", commands],
            cwd=work,
            env=clean | PATIENT | {"PATH": path, "CLONE": str(clone)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = shell.wait(TIME_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    printed = log.read_text()
    assert status == 0, f"{printed[-3_000:]}\n{logs(work)}"
    return printed


def logs(work: Path) -> str:
    """Return the last lines of what the processes have logged."""
    return "\n".join(f"{each.name}: {each.read_text()[-500:]}" for each in sorted(work.glob("*.log")))


def free_ports() -> int:
    """Return a number from which on a hundred ports are free."""
    while True:
        base = randrange(20_000, 32_000, 100)
        with suppress(OSError), ExitStack() as opened:
            for port in range(base, base + 100):
                opened.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return base
