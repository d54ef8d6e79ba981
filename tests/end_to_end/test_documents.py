"""The commands in README.md and docs/ do what the text around them says, on a stack of their own."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from leasehold.processes import wait_until
from tests.end_to_end.launching import PATIENCE_S, Launcher, running

ROOT = Path(__file__).parent.parent.parent
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PORT = re.compile(r"127\.0\.0\.1:(84\d\d)")

pytestmark = [
    pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are for curl, which is not here"),
    pytest.mark.xdist_group("documents"),  # one stack for all pages
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """With something in the books, as a reader has who comes to a page after the README."""
    with running(tmp_path_factory.mktemp("stack") / "data", "--json") as launcher:
        assert launcher.check("us-east").status == 200
        assert wait_until(lambda: launcher.consumed() == 1, PATIENCE_S)
        yield launcher


def examples(page: str) -> list[str]:
    return _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_every_example_of_a_page_works(page: str, stack: Launcher) -> None:
    for example in examples(page):
        said = run(example, stack)
        assert '"status":4' not in said, f"{example}\n{said}"
        assert '"status":5' not in said, f"{example}\n{said}"
        assert said.startswith("{"), f"{example}\n{said}"


def run(example: str, stack: Launcher) -> str:
    """With the ports and tokens of this stack. curl's own failures end the test."""
    base = int(stack.stack["coordinator"].rpartition(":")[2]) - 8400
    command = _PORT.sub(lambda found: f"127.0.0.1:{int(found[1]) + base}", example.replace("curl -s", "curl -sS"))
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # for `leasehold`
    tokens = {"USAGE_TOKEN": stack.stack["tokens"]["usage:read"], "ADMIN_TOKEN": stack.stack["tokens"]["admin"]}
    done = subprocess.run(
        ["bash", "-eu", "-c", command],
        env=os.environ | path | tokens,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def test_the_pages_have_examples() -> None:
    assert {page: len(examples(page)) for page in PAGES if page.count("/") < 2} == {
        "README.md": 4,
        "docs/auditing.md": 2,
        "docs/finance.md": 5,
        "docs/limits.md": 5,
        "docs/operations.md": 10,
        "docs/performance.md": 0,
        "docs/services.md": 4,
        "docs/simulation.md": 0,
        "docs/webhooks.md": 0,
    }


def test_no_link_between_pages_is_broken() -> None:
    for page in [*PAGES, "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "lua/README.md", "compose/README.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
