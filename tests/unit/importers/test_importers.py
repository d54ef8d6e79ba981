"""What is imported is a valid document, and what has no equal is named; the published table says the same."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from coordinator.limits.document import YAML, read_document, write_yaml
from leasehold.cli.app import app
from leasehold.importers.envoy_ratelimit import import_configurations
from leasehold.importers.imported import Imported, InvalidConfiguration
from leasehold.importers.limitador import import_limits
from tests.unit.importers.cases import ENVOY_RATELIMIT, LIMITADOR, Case, entry, limit, tree

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "envoy-moving.md"
CASES = [("envoyproxy/ratelimit", case) for case in ENVOY_RATELIMIT] + [("Limitador", case) for case in LIMITADOR]


def imported(origin: str, case: Case) -> Imported:
    return (
        import_limits("limits.yaml", case.config)
        if origin == "Limitador"
        else import_configurations({"a": case.config})
    )


@pytest.mark.parametrize(("origin", "case"), CASES, ids=lambda each: each.name if isinstance(each, Case) else each)
def test_the_result_is_a_valid_document_that_names_what_has_no_equal(origin: str, case: Case) -> None:
    found = imported(origin, case)
    read_document(write_yaml(found.document), YAML)
    assert bool(case.note) == bool(found.notes), found.notes
    assert all(case.note in note for note in found.notes)


@pytest.mark.parametrize(("origin", "case"), CASES, ids=lambda each: each.name if isinstance(each, Case) else each)
def test_the_published_table_has_each_case(origin: str, case: Case) -> None:
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").split("\n") if line.startswith("| ")]
    [row] = [row for row in rows if row[1].strip() == case.name]
    kept = imported(origin, case).policies
    assert row[2].strip() == ("yes" if not case.note else "in part" if kept else "no")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([], "a mapping is expected"),
        ({"descriptors": []}, "`domain` is required"),
        (tree("a", {"value": "x"}), "`key` is required"),
        (tree("a", entry("b", **limit(1, "fortnight"))), "unknown unit 'fortnight'"),
        (tree("a", entry("b", **limit(-1))), "requests_per_unit: a whole number of 0 or more"),
        (tree("a", entry("b", misspelled=1)), "unknown field `misspelled`"),
    ],
)
def test_what_is_no_configuration_is_refused_by_name(content: object, reason: str) -> None:
    with pytest.raises(InvalidConfiguration, match=reason):
        import_configurations({"file": content})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "a list is expected"),
        ([{"max_value": 1, "seconds": 1}], "`namespace` is required"),
        ([{"namespace": "a", "max_value": 1, "seconds": 1, "else": 1}], "unknown field 'else'"),
        ([{"namespace": "a", "max_value": "many", "seconds": 1}], "max_value: a whole number"),
    ],
)
def test_what_are_no_limits_is_refused_by_name(content: object, reason: str) -> None:
    with pytest.raises(InvalidConfiguration, match=reason):
        import_limits("file", content)


def test_the_command_writes_the_document_and_names_what_has_no_equal(tmp_path: Path) -> None:
    config, output = tmp_path / "config.yaml", tmp_path / "limits.yaml"
    config.write_text(yaml.safe_dump(tree("edge", entry("user", **limit(2)), entry("path", "/x*", **limit(1)))))
    found = CliRunner().invoke(app, ["import", "envoy-ratelimit", str(config), "-o", str(output)])
    assert found.exit_code == 0
    assert "no equal: edge: path=/x*" in found.stderr
    written = output.read_bytes()
    assert written.startswith(b"# no equal: edge: path=/x*")
    document = read_document(written, YAML)
    assert [each.name for each in document.quotas] == ["edge-user"]
    assert [each.shadow for each in document.policies] == [False]
    CliRunner().invoke(app, ["import", "envoy-ratelimit", str(config), "-o", str(output), "--shadow"])
    assert [each.shadow for each in read_document(output.read_bytes(), YAML).policies] == [True]
    config.write_text("descriptors: []")
    refused = CliRunner().invoke(app, ["import", "envoy-ratelimit", str(config)])
    assert refused.exit_code == 1
    assert "`domain` is required" in refused.stderr
