"""The wheel works with an application that has modules of the same names."""

import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from migrations.revisions import known_revisions
from tools.build_hook import with_inner_imports

ROOT = Path(__file__).parents[2]
DEPENDENCIES = Path(sysconfig.get_paths()["purelib"])
OF_THE_CLIENT = ("msgspec", "httptools")
APPLICATION = ("coordinator", "doors", "lua", "migrations", "protocol", "regional_agent", "web")
MOST_MODULES = 82

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [built] = directory.glob("*.whl")
    return built


def installed(wheel: Path, directory: Path) -> Path:
    """A new venv with the wheel, and an application whose modules have the names of our packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory / "venv"], check=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        f"{directory}/venv/bin/python",
        "install",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, "--quiet", str(wheel)], check=True)
    for name in APPLICATION:
        (directory / f"{name}.py").write_text("OF_THE_APPLICATION = True\n")
    [packages] = (directory / "venv/lib").glob("python*/site-packages")
    return packages


def runner(directory: Path) -> Run:
    """Run a program of the venv in the application's directory."""

    def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [str(directory / "venv/bin" / words[0]), *words[1:]]
        return subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="module")
def client_only(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("client")
    packages = installed(wheel, directory)
    for name in OF_THE_CLIENT:
        (packages / name).symlink_to(DEPENDENCIES / name)
    return runner(directory)


@pytest.fixture(scope="module")
def everything(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("server")
    (installed(wheel, directory) / "dependencies.pth").write_text(f"{DEPENDENCIES}\n")
    return runner(directory)


@pytest.mark.extended
def test_one_name_is_put_into_site_packages(wheel: Path) -> None:
    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"leasehold"}


@pytest.mark.extended
def test_the_client_needs_few_modules_and_none_of_the_applications(client_only: Run) -> None:
    ran = client_only(
        "python",
        "-c",
        "import sys; before = set(sys.modules); from leasehold import Client; print(*set(sys.modules) - before)\n"
        "import coordinator, doors, lua, migrations, protocol, regional_agent, web\n"
        "assert protocol.OF_THE_APPLICATION\n"
        "client = Client('http://127.0.0.1:9', on_failure='open')\n"
        "assert client.check({'tenant': 'acme'}).degraded == 'open'",
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.split()) <= MOST_MODULES, ran.stdout


@pytest.mark.extended
def test_the_client_and_the_middleware_need_two_packages(client_only: Run) -> None:
    ran = client_only("python", "-c", "import leasehold.middleware; from leasehold import AsyncClient")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.extended
def test_commands_that_need_the_server_extra_say_so(client_only: Run) -> None:
    command = client_only("leasehold", "--help")
    assert (command.returncode, command.stdout) == (1, "")
    assert command.stderr == "leasehold: typer is not installed. Run: pip install 'leasehold[server]'\n"
    engine = client_only("python", "-c", "from leasehold import Engine")
    assert engine.stderr.endswith("pip install 'leasehold[server]'\n")


@pytest.mark.extended
def test_the_wheel_migrates_a_database_and_reads_its_own_scripts(everything: Run, empty_database: str) -> None:
    migrated = everything("leasehold", "migrate", LEASEHOLD_MIGRATE_DATABASE_URL=empty_database)
    assert migrated.returncode == 0, migrated.stderr
    ran = everything(
        "python",
        "-c",
        "import leasehold.coordinator.main, leasehold.regional_agent.main, leasehold.local_stack.launcher, sys\n"
        "from leasehold.regional_agent.store.sources import shipped_library\n"
        "from leasehold.migrations.revisions import known_revisions\n"
        "print(len(shipped_library().functions) > 9, known_revisions(), 'coordinator' in sys.modules)\n"
        f"print([m.__file__ for m in sys.modules.values() if str(getattr(m, '__file__', '')).startswith({str(ROOT)!r})"
        f" and '.venv' not in str(m.__file__)])",
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [f"True {known_revisions()} False", "[]"]


def test_every_way_to_import_a_package_of_ours_is_rewritten() -> None:
    source = (
        "import lua\n"
        "import web.settings as settings\n"
        "if x:\n    from protocol.check import (  # protocol\n        Check,\n    )\n"
        "from protocols import from_protocol\n"
        "from .protocol import y\n"
    )
    assert with_inner_imports(source) == (
        "from leasehold import lua\n"
        "import leasehold.web.settings as settings\n"
        "if x:\n    from leasehold.protocol.check import (  # protocol\n        Check,\n    )\n"
        "from protocols import from_protocol\n"
        "from .protocol import y\n"
    )
    with pytest.raises(ValueError, match="cannot be rewritten"):
        with_inner_imports("import protocol.check\n")
