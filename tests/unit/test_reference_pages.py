"""The reference pages, which are written from the code, contain everything that they are about."""

import re

import pytest

from docs.reference_pages import SERVICES, pages
from protocol.problems import PROBLEMS
from web.settings import Settings, variable_of


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


def test_every_command_has_a_section(written: dict[str, str]) -> None:
    assert {"## `leasehold up`", "## `leasehold verify`", "### `leasehold period close`"} <= set(
        written["cli"].splitlines()
    )


def test_every_operation_of_the_api_has_a_section(written: dict[str, str]) -> None:
    assert "## `POST /v1/check`" in written["agent-api"]
    assert "## `GET /v1/usage`" in written["coordinator-api"]
