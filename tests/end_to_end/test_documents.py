"""The commands in README.md and docs/ do what the text around them says, on a stack of their own."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from leasehold import Client
from leasehold.local_stack.processes import wait_until
from tests.certificates import Handshake
from tests.end_to_end.launching import PATIENCE_S, SHARED, Launcher
from web.tls.context import TlsFiles, client_context, server_context

ROOT = Path(__file__).parent.parent.parent
PAGES = ["README.md", *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md")))]
TLS = "docs/guides/tls.md"  # its examples need no stack
THREE_REGIONS = "docs/guides/three-regions.md"  # it has a test of its own
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PORT = re.compile(r"127\.0\.0\.1:(84\d\d)")

pytestmark = [
    pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are for curl, which is not here"),
    pytest.mark.xdist_group(SHARED),
]


def examples(page: str) -> list[str]:
    return _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def exported(stack: Launcher) -> str:
    """Return the shell variables that `leasehold env` prints for the stack."""
    command = [sys.executable, "-m", "leasehold.cli", "env", "--data", str(stack.data)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.extended
@pytest.mark.parametrize("page", [page for page in PAGES if examples(page) and page not in (TLS, THREE_REGIONS)])
def test_every_example_of_a_page_works(page: str, stack: Launcher, exported: str) -> None:
    for example in examples(page):
        printed = run(example, stack, exported)
        assert '"status":4' not in printed or '"type":"/problems/quota-exceeded"' in printed, f"{example}\n{printed}"
        assert '"status":5' not in printed, f"{example}\n{printed}"
        if "curl" in example or "--json" in example:
            assert printed.lstrip().startswith("{"), f"{example}\n{printed}"


def run(example: str, stack: Launcher, exported: str) -> str:
    """Run an example with the ports, tokens and PATH of this stack. A failure of a command ends the test."""
    base = int(stack.stack["coordinator"].rpartition(":")[2]) - 8400
    command = _PORT.sub(lambda found: f"127.0.0.1:{int(found[1]) + base}", example.replace("curl -s", "curl -sS"))
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", f"{exported}\n{command}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def test_the_certificates_of_the_guide_are_accepted(tmp_path: Path) -> None:
    """Each side verifies the other by the files that the guide's commands write."""
    done = subprocess.run(
        ["bash", "-eu", "-c", "\n".join(examples(TLS))], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

    def files(name: str) -> TlsFiles:
        return TlsFiles(tmp_path / "ca.pem", tmp_path / f"{name}.pem", tmp_path / f"{name}.key")

    for client, server, host in (
        ("agent", "coordinator", "coordinator.internal"),
        ("agent", "coordinator", "127.0.0.1"),
        ("service", "agent", "agent.internal"),
    ):
        contexts = client_context(files(client)), server_context(files(server))
        assert not Handshake(*contexts, host).failures
        assert Handshake(*contexts, "elsewhere.internal").failures


def test_the_quickstart_leads_to_a_line_of_usage(stack: Launcher, exported: str) -> None:
    """The usage of both regions contains what its checks consumed and nothing that was denied."""
    for example in examples("docs/quickstart.md"):
        run(example, stack, exported)

    def is_booked() -> bool:
        usage = run("leasehold usage --group-by tenant,quota,region --json", stack, exported)
        units = Counter[str]()
        for line in json.loads(usage)["data"]:
            units[line["dimensions"]["region"]] += line["units"]
        return units["ap-south"] >= 4 and units["us-east"] >= 3

    assert wait_until(is_booked, PATIENCE_S)


def test_the_examples_of_the_python_client_work(stack: Launcher) -> None:
    """Run the examples but those of TLS and of the engine, which need certificates and a store of their own."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs/guides/python.md").read_text(), re.MULTILINE | re.DOTALL
    )
    names: dict[str, object] = {
        "render": lambda: 25,
        "check_password": lambda user, password: False,
        "user": "alice",
        "password": "wrong",
        "request_id": "r-1",
    }
    runnable = [block for block in blocks if "https://" not in block and "Engine()" not in block]
    assert (len(blocks), len(runnable)) == (8, 5)
    try:
        for block in runnable:
            here = block.replace("http://127.0.0.1:8411", stack.stack["agents"]["us-east"])
            exec(here.replace('"acme"', '"initech"'), names)  # the other pages have used up what acme has
    finally:
        assert isinstance(names["client"], Client)
        names["client"].close()


def test_the_pages_have_examples() -> None:
    assert {page: len(examples(page)) for page in PAGES if examples(page)} == {
        "README.md": 4,
        "docs/guides/auditing.md": 3,
        "docs/guides/closing.md": 1,
        "docs/guides/decisions.md": 2,
        "docs/guides/finance.md": 4,
        "docs/guides/limits.md": 8,
        "docs/guides/production.md": 1,
        "docs/guides/recovery.md": 1,
        "docs/guides/regions.md": 6,
        "docs/guides/services.md": 7,
        "docs/guides/stores.md": 1,
        "docs/guides/three-regions.md": 20,
        "docs/guides/tls.md": 2,
        "docs/how-to.md": 10,
        "docs/quickstart.md": 6,
    }


def test_no_link_of_a_page_outside_of_the_site_is_broken() -> None:
    """`./dev docs` checks the links of the site itself."""
    for page in [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "lua/README.md",
        "compose/README.md",
    ]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
