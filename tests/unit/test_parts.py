"""Parts that tests fetch: what cannot be fetched is said, and never left out in CI."""

import os
import threading
from pathlib import Path

import pytest

from tests import budget, parts
from tools.parts import CannotFetch, find_or_fetch_without_root, main
from tools.parts import fetch as fetch_part


@pytest.fixture(autouse=True)
def full_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give these tests a full run, in which parts may be had."""
    monkeypatch.setenv(budget.VARIABLE, budget.FULL)


def cannot_fetch(name: str) -> Path:
    raise CannotFetch(f"{name} cannot be had here")


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_part_fails_in_ci_and_is_skipped_with_its_reason_elsewhere(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    for way in ("fetch", "find_or_fetch_without_root"):
        monkeypatch.setattr(parts, way, cannot_fetch)
    with pytest.raises(outcome, match="redis cannot be had here"):
        parts.part("redis")


def test_an_unknown_part_is_answered_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "redis" in capsys.readouterr().out


# --- parts that are installed into the machine ------------------------------------------------------------------------

# It writes down its words, and installs what each part would bring, once: two at a time break dpkg.
APT_GET = """#!/bin/sh
here=$(dirname "$0")
echo "$DEBIAN_FRONTEND" "$@" >> "$here/typed"
[ "$1" = install ] || exit 0
[ -e "$here/broken" ] && { echo "E: Unable to locate package" >&2; exit 100; }
mkdir "$here/busy" || exit 100
/bin/sleep 0.2
for program in chromium soffice; do printf '#!/bin/sh\n' > "$here/$program"; /bin/chmod +x "$here/$program"; done
/bin/rmdir "$here/busy"
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only directory with programs: one with an apt-get that root may call, and nothing else."""
    apt_get = tmp_path / "apt-get"
    apt_get.write_text(APT_GET)
    apt_get.chmod(0o755)
    for tool in ("dirname", "mkdir"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("tools.parts.APT_STATE", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "program", "package"),
    [("chromium", "chromium", "chromium"), ("libreoffice", "soffice", "libreoffice-calc")],
)
def test_a_missing_program_is_installed_once_and_without_questions(
    machine: Path, name: str, program: str, package: str
) -> None:
    assert fetch_part(name) == fetch_part(name) == machine / program
    assert (machine / "typed").read_text().splitlines() == [
        "noninteractive update",
        f"noninteractive install -y --no-install-recommends -o DPkg::Lock::Timeout=1200 {package}",
    ]


def test_tests_that_miss_a_program_together_install_it_once(machine: Path) -> None:
    found: list[Path] = []
    together = [threading.Thread(target=lambda: found.append(fetch_part("chromium"))) for _ in range(4)]
    for each in together:
        each.start()
    for each in together:
        each.join(60)
    assert found == [machine / "chromium"] * 4
    assert len((machine / "typed").read_text().splitlines()) == 2


def test_only_ci_installs_into_the_machine(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"\./dev parts chromium"):
        parts.part("chromium")
    assert not (machine / "typed").exists()
    monkeypatch.setenv("CI", "true")
    assert parts.part("chromium") == machine / "chromium"
    monkeypatch.delenv("CI")
    assert parts.part("chromium") == machine / "chromium"


def test_what_hinders_an_installation_is_said(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "broken").touch()
    with pytest.raises(CannotFetch, match=r"cannot install chromium .*Unable to locate"):
        fetch_part("chromium")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotFetch, match="only root"):
        fetch_part("chromium")
    (machine / "apt-get").unlink()
    with pytest.raises(CannotFetch, match="apt-get is missing"):
        fetch_part("chromium")


def test_a_library_counts_as_found_only_with_the_others(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = {"pango-1.0": "libpango-1.0.so.0", "pangoft2-1.0": "libpangoft2-1.0.so.0"}
    monkeypatch.setattr("ctypes.util.find_library", libraries.get)
    with pytest.raises(CannotFetch, match=r"\./dev parts pango"):
        find_or_fetch_without_root("pango")
    with pytest.raises(CannotFetch, match="pango is still missing"):
        fetch_part("pango")
    assert "libharfbuzz-subset0" in (machine / "typed").read_text()
    libraries["harfbuzz-subset"] = "libharfbuzz-subset.so.0"
    assert fetch_part("pango") == Path("libpango-1.0.so.0")
