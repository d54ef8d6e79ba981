"""The reference pages, which are written from the code, are complete."""

import json
import re
from pathlib import Path

import pytest

from docs.reference_pages import OPENAPI, SERVICES, pages
from leasehold.doctor.catalogue import all_checks
from protocol.problems import PROBLEMS
from web.settings import Settings, variable_of

DOCUMENTS = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
GUIDES = [page for page in DOCUMENTS if page.parent.name == "guides"]
NO_SERIES_OF_A_PROCESS = {
    "leasehold_worker_up",
    "leasehold_coordinator",
}  # of all workers together, and a database role


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return pages()


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_is_described(service: str, written: dict[str, str]) -> None:
    cls: type[Settings] = SERVICES[service]
    for name, field in cls.model_fields.items():
        assert field.description, f"{variable_of(cls, name)} has no description"
        assert f"| `{variable_of(cls, name)}` |" in written["settings"]


def test_every_kind_of_problem_is_listed(written: dict[str, str]) -> None:
    assert re.findall(r"</a>`([\w-]+)` \|", written["errors"])
    assert set(re.findall(r"</a>`([\w-]+)` \|", written["errors"])) == set(PROBLEMS)


def test_metrics_of_both_services_are_listed(written: dict[str, str]) -> None:
    for name in ("leasehold_checks_total", "leasehold_ready", "leasehold_coordinator_exchanges_total"):
        assert f"| `{name}` |" in written["metrics"]


def test_every_metric_that_the_documentation_names_exists(written: dict[str, str]) -> None:
    known = re.findall(r"^\| `(\w+)` \|", written["metrics"], re.MULTILINE)
    names = {name for page in GUIDES for name in re.findall(r"\bleasehold_[a-z_]+", page.read_text(encoding="utf-8"))}
    assert len(names) > 30
    assert not {name for name in names - NO_SERIES_OF_A_PROCESS if not name.startswith(tuple(known))}


def test_every_check_is_explained(written: dict[str, str]) -> None:
    checks = all_checks()
    for each in checks:
        assert f"<a id='{each.code}'></a>`{each.code}`" in written["checks"]
    production = (OPENAPI.parent / "guides" / "production.md").read_text("utf-8")
    rows = re.findall(r"^\| .* \| (`[\w`, ]+`) \|$", production, re.MULTILINE)
    named = {code for row in rows for code in re.findall(r"`(\w+)`", row)}
    assert named == {each.code for each in checks}


def test_every_command_has_a_section(written: dict[str, str]) -> None:
    assert {"## `leasehold up`", "## `leasehold verify`", "### `leasehold period close`"} <= set(
        written["cli"].splitlines()
    )


def test_every_command_and_option_that_the_documentation_names_exists(written: dict[str, str]) -> None:
    help_of = dict(re.findall(r"^#{2,3} `leasehold ([\w -]+)`\n(.*?)(?=^#{2,3} `|\Z)", written["cli"], re.M | re.S))
    groups = {name.split()[0] for name in help_of if " " in name}
    for page in DOCUMENTS:
        text = page.read_text("utf-8")
        for first, second, rest in re.findall(r"(?<=[`$ (])leasehold ([a-z-]+)(?: ([a-z][a-z-]*))?([^\n`|]*)", text):
            if first in {name.split()[0] for name in help_of}:  # otherwise it is a sentence about Leasehold
                name = f"{first} {second}" if first in groups and second else first
                assert name in help_of, f"{page}: leasehold {name}"
                unknown = {option for option in re.findall(r"(?<!\w)--[a-z-]+", rest) if option not in help_of[name]}
                assert not unknown, f"{page}: leasehold {name}"


def test_every_path_of_the_api_that_the_documentation_names_exists() -> None:
    templates = [
        (method.upper(), re.compile(re.sub(r"\\{.*?\\}", "[^/:]+", re.escape(path))))
        for service in SERVICES
        for path, methods in json.loads((OPENAPI / f"{service}.json").read_text("utf-8"))["paths"].items()
        for method in methods
    ]
    named = re.compile(r"(GET|POST|PUT|DELETE|PATCH) (/v1/[\w/:.{}-]*[\w}])")
    for page in DOCUMENTS:
        for method, path in named.findall(page.read_text("utf-8")):
            assert any(method == each and template.fullmatch(path) for each, template in templates), f"{page}: {path}"


def test_every_operation_of_the_api_has_a_section(written: dict[str, str]) -> None:
    assert "## `POST /v1/check`" in written["agent-api"]
    assert "## `GET /v1/usage`" in written["coordinator-api"]


@pytest.mark.parametrize("service", SERVICES)
def test_headers_have_their_own_names(service: str) -> None:
    paths = json.loads((OPENAPI / f"{service}.json").read_text("utf-8"))["paths"]
    parameters = [
        each for methods in paths.values() for method in methods.values() for each in method.get("parameters", [])
    ]
    named = {each["name"] for each in parameters if each["in"] == "header"}
    assert named <= {"If-Match", "If-None-Match", "Idempotency-Key", "Prefer", "Range"}
