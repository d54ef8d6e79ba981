"""Installs what Leasehold is compared with in `.peers/`, with pinned versions and hashes.

Leasehold itself needs none of it.
"""

import hashlib
import json
import os
import shutil
import subprocess
import venv
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INSTALLED = ROOT / ".peers"
NODE_PACKAGES = ("rate-limiter-flexible@11.4.0", "ioredis@6.0.0")


class GoModule(NamedTuple):
    """A program in a Go module, with the module's hash as in a go.sum."""

    program: str
    version: str  # of the module
    package: str
    hash: str


GO_MODULES = (
    GoModule(
        "ratelimit",
        "github.com/envoyproxy/ratelimit@v1.4.1-0.20260122083618-3fb702589d36",
        "./src/service_cmd",
        "h1:nEi1OH2qhE8NtcuBgO/uKpTw/P0nVu4i8mZvL6oD9CQ=",
    ),
    GoModule(
        "gubernator",
        "github.com/gubernator-io/gubernator/v2@v2.13.0",
        "./cmd/gubernator",
        "h1:kvY3ppEpKBnUCKGLXBXO9QT/HQTpQVTwLzpQe6asOu0=",
    ),
)
GENERATOR = "loadgen"
NOT_IN_A_REGISTRY = {"limitador-server": "no package registry has it and it is not on the PATH"}


class NotInstalledError(Exception):
    """A part of the comparison cannot be had on this machine."""


class Installed(NamedTuple):
    """The directory of all installed parts, and for each missing part the reason."""

    directory: Path
    missing: dict[str, str]

    @property
    def python(self) -> Path:
        return self.directory / "python" / "bin" / "python"

    @property
    def node_modules(self) -> Path:
        return self.directory / "node" / "node_modules"

    def program(self, name: str) -> Path | None:
        """Return a program that was installed here or is on the PATH."""
        if name in self.missing:
            return None
        found = shutil.which(name, path=f"{self.directory / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}")
        return Path(found) if found else None


def install(only: Collection[str] = ()) -> Installed:
    """Install what is missing, and again what is made from something else by now; all of it if none is named."""
    loadgen = HERE / GENERATOR
    steps: dict[str, tuple[Callable[[], None], Iterable[str]]] = {
        GENERATOR: (_build_generator, (path.read_text() for path in sorted(loadgen.glob("*.*")))),
        **{each.program: (partial(_build, each), each) for each in GO_MODULES},
        "python": (_install_python, [(HERE / "requirements.txt").read_text()]),
        "node": (_install_node, NODE_PACKAGES),
    }
    missing: dict[str, str] = {}
    for name, (make, made_from) in steps.items():
        if only and name not in only:
            continue
        try:
            _make_once(name, make, made_from)
        except NotInstalledError as error:
            missing[name] = str(error)
    installed = Installed(INSTALLED, missing)
    absent = {name: why for name, why in NOT_IN_A_REGISTRY.items() if installed.program(name) is None}
    return Installed(INSTALLED, missing | absent)


def _make_once(name: str, make: Callable[[], None], made_from: Iterable[str]) -> None:
    mark = INSTALLED / f"{name}.made-from"
    fingerprint = hashlib.sha256("\0".join(made_from).encode()).hexdigest()
    if mark.exists() and mark.read_text() == fingerprint:
        return
    print(f"installing {name} in .peers/ (needs the network)", flush=True)
    INSTALLED.mkdir(exist_ok=True)
    make()
    mark.write_text(fingerprint)


def _build_generator() -> None:
    _run(_tool("go"), "build", "-C", HERE / GENERATOR, "-o", INSTALLED / "bin" / GENERATOR, ".")


def _build(module: GoModule) -> None:
    """Build a server from its own module, with the versions that its authors chose for its dependencies."""
    downloaded = _run(
        _tool("go"), "mod", "download", "-json", module.version, GOSUMDB="off"
    )  # we have the hash ourselves
    found = json.loads(downloaded)
    if found["Sum"] != module.hash:
        raise SystemExit(f"{module.version} has the hash {found['Sum']}, not {module.hash}")
    _run(_tool("go"), "build", "-C", found["Dir"], "-o", INSTALLED / "bin" / module.program, module.package)


def _install_python() -> None:
    directory = INSTALLED / "python"
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, with_pip=True)
    requirements = HERE / "requirements.txt"
    _run(directory / "bin" / "python", "-m", "pip", "install", "--quiet", "--require-hashes", "-r", requirements)


def _install_node() -> None:
    _tool("node")
    _run(_tool("npm"), "install", "--silent", "--no-package-lock", "--prefix", INSTALLED / "node", *NODE_PACKAGES)


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise NotInstalledError(f"this machine has no {name}")
    return found


def _run(*command: str | Path, **environ: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | environ)
    if done.returncode:
        raise NotInstalledError(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout
