"""Examples of limits documents and of Python in the documentation are valid."""

import ast
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from coordinator.limits.document import read_document

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "how-to.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
_PIECE = re.compile(r"^    (?:plans|quotas|policies):.*\n(?:(?:    .*)?\n)*", re.MULTILINE)
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pieces() -> list[tuple[str, str]]:
    return [(page.name, dedent(piece)) for page in PAGES for piece in _PIECE.findall(page.read_text(encoding="utf-8"))]


def completed(piece: dict[str, Any]) -> dict[str, Any]:
    """Return a whole document: the piece, with plans, and quotas and policies that it only implies."""
    document = {"plans": {"free": {}, "pro": {}}, "default_plan": "free", "quotas": [], "policies": []} | piece
    known = {quota["name"] for quota in document["quotas"]}
    for policy in document["policies"]:
        if policy["quota"] not in known:
            document["quotas"].append({"name": policy["quota"], "kind": "rate", "limit": "10/minute"})
    used = {policy["quota"] for policy in document["policies"]}
    for name in known - used:
        document["policies"].append({"name": f"of-{name}", "by": ["tenant"], "quota": name})
    return document


@pytest.mark.parametrize(("page", "piece"), pieces())
def test_a_piece_of_a_limits_document_is_valid(page: str, piece: str) -> None:
    """Parsing a document raises the problem that names its faults."""
    assert read_document(yaml.safe_dump(completed(yaml.safe_load(piece))).encode(), "application/yaml"), page


def test_the_documentation_has_pieces_of_documents() -> None:
    assert len(pieces()) >= 10


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")])
def test_python_of_a_page_can_be_parsed(page: Path) -> None:
    for block in _PYTHON.findall(page.read_text(encoding="utf-8")):
        compile(block, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
