"""The installed client passes the strict type checkers of its users."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.test_wheel import DEPENDENCIES, OF_THE_CLIENT, installed, wheel
from tests.parts import part

CONSUMER = Path(__file__).parent / "consumer.py"
WRONG = "\nclient.check('acme')\n"  # a subject is a mapping

__all__ = ["wheel"]  # the fixture


@pytest.fixture(scope="module")
def project(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a user's project, with a program and a venv in which the wheel is installed."""
    directory = tmp_path_factory.mktemp("consumer")
    packages = installed(wheel, directory)
    for name in OF_THE_CLIENT:
        (packages / name).symlink_to(DEPENDENCIES / name)
    (directory / "right.py").write_text(CONSUMER.read_text())
    (directory / "wrong.py").write_text(CONSUMER.read_text() + WRONG)
    return directory


@pytest.mark.extended
def test_a_program_passes_mypy_strict(project: Path) -> None:
    python = str(project / "venv/bin/python")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "right.py", "wrong.py"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [line.partition(":")[0] for line in found] == ["wrong.py"], done.stdout


@pytest.mark.extended
def test_a_program_passes_pyright_strict(project: Path) -> None:
    pyright = part("pyright") / "node_modules" / "pyright" / "index.js"
    settings = {"include": ["right.py", "wrong.py"], "typeCheckingMode": "strict", "venvPath": ".", "venv": "venv"}
    (project / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["node", str(pyright), "--outputjson", "-p", "."]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    messages = [f"{Path(each['file']).name}: {each['message']}" for each in found if each["severity"] == "error"]
    assert [message.partition(":")[0] for message in messages] == ["wrong.py"], messages
