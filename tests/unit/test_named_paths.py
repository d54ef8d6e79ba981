"""Paths, fields and log lines that documents name in code style exist."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"site"}
_SPAN = re.compile(r"(?<!`)`([\w.*-]+(?:/[\w.*-]+)*/?)`(?!`)")
_FIELD = re.compile(r"(?<!`)`([a-z]+(?:_[a-z0-9]+)+)`(?!`)")
_LOG_LINE = re.compile(r"(?<!`)`([a-z][a-z' -]+ [a-z' -]*[a-z])`(?!`)")
_METRICS = "leasehold_"  # test_reference_pages.py compares these
# Composed in the code, or words of Redis, pip and our own commands.
FIELDS_OF_POSTGRES = {"archive_timeout", "failed_count", "last_archived_time", "pg_dump", "pg_stat_archiver"}
FIELDS_OF_ENVOY = {
    *(
        "apply_on_stream_done",
        "destination_cluster",
        "dynamic_metadata",
        "generic_key",
        "grpc_health_check",
        "header_match",
        "initial_metadata",
    ),
    *("is_negative_hits", "over_limit", "overall_code"),
    *("direct_response", "expired_assignment_behavior", "expired_assignment_behavior_timeout", "failure_mode_deny"),
    *("header_name", "initial_metadata", "no_assignment_behavior", "reporting_interval", "detailed_metric"),
}
OTHERS = {"coordinator not ready", "coordinator degraded", "agent is not ready", "agent is degraded", "agent is ready"}
OF_OTHERS = (
    *("appendfsync ", "no-appendfsync", "cluster-require", "pip ", "leasehold ", "region list"),
    *("helm ", "systemctl ", "systemd-"),
)
_PAGE = re.compile(r"\bdocs/[\w/-]+\.md")


def documents() -> Iterator[Path]:
    yield from ROOT.glob("*.md")
    yield from (ROOT / "docs").rglob("*.md")
    yield from ROOT.glob("*/README.md")


def missing(text: str) -> set[str]:
    """Return the paths in code style that begin with a folder of the repository and lead nowhere."""
    paths = {path for path in _SPAN.findall(text) if "/" in path and path.partition("/")[0] in FOLDERS}
    return {path for path in paths if not any(ROOT.glob(path.rstrip("/")))}


def test_every_path_that_a_document_names_exists() -> None:
    found = {str(page.relative_to(ROOT)): missing(page.read_text(encoding="utf-8")) for page in documents()}
    assert not {page: paths for page, paths in found.items() if paths}


def test_a_path_that_leads_nowhere_is_found() -> None:
    assert missing("see `lua/check.lua`, `lua/*.lua`, `tests/` and `lua/no.lua`") == {"lua/no.lua"}


def test_every_page_that_code_names_exists() -> None:
    sources = (path for folder in sorted(FOLDERS - {"docs"}) for path in (ROOT / folder).rglob("*.py"))
    named = {page for source in [ROOT / "dev", *sources] for page in _PAGE.findall(source.read_text(encoding="utf-8"))}
    assert len(named) > 3
    assert not {page for page in named if not (ROOT / page).exists()}


def sources() -> str:
    """Return the text of the product, with string literals joined that are split over lines."""
    folders = ("coordinator", "regional_agent", "web", "protocol", "leasehold", "lua", "migrations")
    suffixes = {".py", ".lua", ".sql", ".json"}
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in paths))


def test_every_field_and_log_line_that_a_guide_names_exists() -> None:
    product = sources()
    for page in sorted((ROOT / "docs" / "guides").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        named = {field for field in _FIELD.findall(text) if not field.startswith(_METRICS)}
        named -= FIELDS_OF_POSTGRES | FIELDS_OF_ENVOY
        named |= {line for line in _LOG_LINE.findall(text) if not line.startswith(OF_OTHERS)} - OTHERS
        assert not {name for name in named if name not in product}, page
