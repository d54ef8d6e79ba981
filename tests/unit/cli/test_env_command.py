"""`leasehold env` prints shell variables that a shell reads back unchanged."""

import json
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from leasehold.cli.app import app

STACK = {
    "coordinator": "http://127.0.0.1:8400",
    "agents": {"us-east": "http://127.0.0.1:8411", "eu-west": "http://127.0.0.1:8412"},
    "stores": {"us-east": "redis://:secret@127.0.0.1:8479/0"},
    "tokens": {"admin": "lh_it's", "usage:read": "lh_usage", "region:us-east": "lh_region"},
}


def test_a_shell_reads_the_variables_of_a_stack(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text(json.dumps(STACK))
    printed = CliRunner().invoke(app, ["env", "--data", str(tmp_path)])
    assert printed.exit_code == 0
    names = ("LEASEHOLD_URL", "LEASEHOLD_TOKEN", "AGENT_EU_WEST", "LEASEHOLD_AGENT_URL", "USAGE_READ_TOKEN", "PATH%%:*")
    shown = "\n".join(f'echo "${{{name}}}"' for name in names)
    done = subprocess.run(["bash", "-euc", f"{printed.output}\n{shown}"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "http://127.0.0.1:8400",
        "lh_it's",
        "http://127.0.0.1:8412",
        "http://127.0.0.1:8411",
        "lh_usage",
        str(Path(sys.executable).parent),
    ]


def test_without_a_stack_it_says_how_to_start_one(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["env", "--data", str(tmp_path)])
    assert printed.exit_code == 1
    assert "leasehold up" in printed.stderr
    assert not printed.stdout


def test_it_prints_the_settings_of_an_agent(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text(json.dumps(STACK))
    printed = CliRunner().invoke(app, ["env", "--data", str(tmp_path), "--agent", "us-east"])
    assert "export LEASEHOLD_AGENT_REGION=us-east\n" in printed.output
    assert "export LEASEHOLD_AGENT_COORDINATOR_TOKEN=lh_region\n" in printed.output
    assert "export LEASEHOLD_AGENT_STORE_URL=redis://:secret@127.0.0.1:8479/0\n" in printed.output


def test_an_unknown_region_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text(json.dumps(STACK))
    printed = CliRunner().invoke(app, ["env", "--data", str(tmp_path), "--agent", "nowhere"])
    assert printed.exit_code == 1
    assert "us-east" in printed.stderr
