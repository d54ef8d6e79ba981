"""Alerts, their tests, the runbook and the dashboards agree with each other and with the metrics of the code."""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.reference_pages import pages
from tests.promtool import promtool
from tools.dashboards import DASHBOARDS, FOLDER, document, written

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "compose/prometheus"
RULES: Mapping[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
TESTS: list[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "alerts_test.yaml").read_text())["tests"]
ENTRIES: Mapping[str, str] = dict(
    re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", (ROOT / "docs/guides/runbook.md").read_text(), re.MULTILINE | re.DOTALL)
)
OF_PROMETHEUS = {"up", "ALERTS"}
OF_TARGETS = {"job", "instance", "region", "worker", "le"}  # labels that scraping adds, or every histogram has


def queries() -> Iterator[tuple[str, str]]:
    """Yield every query of the alerts and the dashboards, with what it is for."""
    for name, rule in RULES.items():
        yield name, rule["expr"]
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query in panel.queries.values():
                yield f"{dashboard.name}: {panel.title}", query
        for query in dashboard.variables.values():
            yield dashboard.name, query.removeprefix("label_values(").rpartition(",")[0]


@pytest.fixture(scope="module")
def metrics() -> Mapping[str, set[str]]:
    """Return the labels of each metric of the code, by the names that its series have."""
    found: dict[str, set[str]] = {}
    for name, kind, labels in re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", pages()["metrics"], re.MULTILINE):
        for ending in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            found[name + ending] = set(re.findall(r"`(\w+)`", labels))
    return found | {"leasehold_worker_up": set()}  # of all workers together, so no process of its own shows it


def test_queries_name_metrics_and_labels_that_exist(metrics: Mapping[str, set[str]]) -> None:
    for where, query in queries():
        plain = re.sub(r'"[^"]*"', '""', query)
        named = set(re.findall(r"\b(?:leasehold|process)_\w+", plain))
        assert named | OF_PROMETHEUS & set(re.findall(r"\w+", plain)), f"{where}: {query}"
        assert not named - set(metrics), f"{where}: {query}"
        for name, matchers in re.findall(r"\b(leasehold_\w+){([^}]*)}", plain):
            labels = set(re.findall(r"(\w+)(?:=~|!~|!=|=)", matchers))
            own = metrics[name] | ({"leasehold_store_circuit_breaker"} & {name})
            assert not labels - own - OF_TARGETS, f"{where}: {name}{{{matchers}}}"


@pytest.mark.extended
def test_promtool_parses_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": "a:query", "labels": {"of": where}, "expr": re.sub(r"\$__rate_interval", "5m", query)}
        for where, query in queries()
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    for checked in (path, PROMETHEUS / "alerts.yaml"):
        done = subprocess.run([promtool(), "check", "rules", checked], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.extended
def test_alerts_fire_when_they_should() -> None:
    command = [str(promtool()), "test", "rules", str(PROMETHEUS / "alerts_test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", RULES)
def test_each_alert_is_tried_when_it_fires_and_when_it_does_not(name: str) -> None:
    expected = [
        (test["name"], bool(case.get("exp_alerts")))
        for test in TESTS
        for case in test["alert_rule_test"]
        if case["alertname"] == name
    ]
    of_its_own = name.removeprefix("Leasehold")
    assert {("quiet", False), (of_its_own, True), (of_its_own, False)} <= set(expected)


@pytest.mark.parametrize("name", RULES)
def test_each_alert_says_how_urgent_it_is_and_where_its_entry_lies(name: str) -> None:
    rule = RULES[name]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"].endswith(".")
    assert rule["annotations"]["runbook_url"].endswith(f"/guides/runbook.html#{name.lower()}")


def test_the_runbook_has_an_entry_for_each_alert_and_no_other() -> None:
    assert set(ENTRIES) == set(RULES)
    for name, text in ENTRIES.items():
        assert re.search(r"^    (curl|leasehold|psql|redis-cli|journalctl|df|ls) ", text, re.MULTILINE), name
        assert "**Over when**" in text, name


def test_the_runbook_has_each_alert_under_its_severity() -> None:
    text = (ROOT / "docs/guides/runbook.md").read_text()
    for severity, chapters in (("page", r"Pages"), ("ticket", r"Tickets: [\w ]+")):
        found = re.findall(rf"^## {chapters}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        named = {name for chapter in found for name in re.findall(r"^### (\w+)", chapter, re.MULTILINE)}
        assert named == {name for name, rule in RULES.items() if rule["labels"]["severity"] == severity}


# --- dashboards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_dashboards_are_written_from_the_table(dashboard: Any) -> None:
    again = "python -m tools.dashboards writes it"
    assert (FOLDER / f"{dashboard.name}.json").read_text(encoding="utf-8") == written(dashboard), again


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_a_dashboard_can_be_read(dashboard: Any) -> None:
    """The rules of Grafana's own linter that concern a reader: what is shown, in which unit, from which data source."""
    made = document(dashboard)
    panels = made["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) < 24
    defined = {variable["name"] for variable in made["templating"]["list"]}
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in {"short", "s", "ops", "percentunit", "bytes"}
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= defined, target["expr"]
            for counter in re.findall(r"\b\w+_(?:total|bucket)\b", target["expr"]):
                assert re.search(rf"rate\({counter}\b", target["expr"]), f"{counter} only grows: show its rate"
