"""Programs that only tests need and no wheel brings: `./dev parts redis` fetches one, once.

It needs the standard library alone. A part that can be unpacked appears in `.parts/` under its name when it is
complete, so one that was interrupted is fetched again. A part with too many dependencies for that is installed into
the machine, which takes root. Processes that want the same part wait for each other.
"""

import ctypes.util
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

TOOLS = Path(__file__).parent
PARTS = TOOLS.parent / ".parts"
NPM_FILES = ("package.json", "package-lock.json")
TIMEOUT_S = 1200  # LibreOffice over a slow network
PROGRAM_FOLDERS = ("usr/bin", "usr/sbin")  # of Debian's packages
APT_STATE = Path("/var/lib/dpkg")  # locked as a directory, which neither apt nor dpkg do


class CannotFetch(Exception):
    """Says in one sentence what is missing, and what to do."""


class LacksHistory(CannotFetch):
    """Says that this copy of the repository lacks a commit, which nothing that is installed can bring."""


class DebianPackages(NamedTuple):
    """Unpacks packages of Debian or Ubuntu without installing them, and so without root."""

    packages: Sequence[str]
    programs: Sequence[str]  # each becomes a script in `bin/`
    about: str

    def install(self, directory: Path) -> None:
        _require("apt-get", "dpkg")
        downloaded = _run(["apt-get", "download", *self.packages], directory)
        if downloaded.returncode != 0 and os.geteuid() == 0:  # an image may come without lists of packages
            _run(["apt-get", "update"], directory)
            downloaded = _run(["apt-get", "download", *self.packages], directory)
        if downloaded.returncode != 0:
            reason = f"apt-get cannot download its packages ({_last_line(downloaded)})"
            raise CannotFetch(f"{reason}; run `apt-get update` as root")
        for package in sorted(directory.glob("*.deb")):
            if _run(["dpkg", "-x", package.name, "."], directory).returncode != 0:
                raise CannotFetch(f"dpkg cannot unpack {package.name}")
            package.unlink()
        (directory / "bin").mkdir()
        for program in self.programs:
            _write_script(directory, program)


def _write_script(directory: Path, program: str) -> None:
    """Write a script that runs a program of the part with the libraries of the part."""
    script = directory / "bin" / program
    place = next((each for each in PROGRAM_FOLDERS if (directory / each / program).exists()), PROGRAM_FOLDERS[0])
    here = '"$(dirname "$(dirname "$(readlink -f "$0")")")"'
    lines = [
        "#!/bin/sh",
        f"here={here}",
        'export LD_LIBRARY_PATH="$(echo "$here"/usr/lib/*-linux-gnu)"',
        f'exec "$here/{place}/{program}" "$@"',
    ]
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o755)
    if _run([str(script), "--version"], directory).returncode != 0:
        raise CannotFetch(f"{program} does not run on this machine")


class NpmPackages(NamedTuple):
    """Installs the packages of a folder's package-lock.json, whose hashes npm compares. Their scripts are not run."""

    folder: Path
    about: str

    def install(self, directory: Path) -> None:
        _require("node", "npm")
        for name in NPM_FILES:
            shutil.copy(self.folder / name, directory)
        installed = _run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], directory)
        if installed.returncode != 0:
            raise CannotFetch(f"npm cannot install {self.folder.name} ({_last_line(installed)})")

    @property
    def version(self) -> str:
        """Return a text that changes with the packages."""
        files = b"".join((self.folder / name).read_bytes() for name in NPM_FILES)
        return hashlib.sha256(files).hexdigest()[:12]


class GoProgram(NamedTuple):
    """Builds a program of the Go proxy, whose checksum database guards it."""

    package: str  # with its version
    program: str
    about: str

    def install(self, directory: Path) -> None:
        _require("go")
        target = directory / "bin"
        environ = {"GOBIN": str(target), "CGO_ENABLED": "0"}
        built = _run(["go", "install", "-trimpath", "-ldflags=-s -w", self.package], directory, environ)
        if built.returncode != 0 or not (target / self.program).exists():
            raise CannotFetch(f"go cannot build {self.package} ({_last_line(built)})")

    @property
    def version(self) -> str:
        return self.package.rpartition("@")[2]


class GoModuleFiles(NamedTuple):
    """Copies files of a module of the Go proxy, whose checksum database guards it."""

    module: str  # with its version
    files: Sequence[str]
    about: str

    def install(self, directory: Path) -> None:
        _require("go")
        downloaded = _run(["go", "mod", "download", "-json", self.module], directory)
        if downloaded.returncode != 0:
            raise CannotFetch(f"go cannot download {self.module} ({_last_line(downloaded)})")
        source = Path(json.loads(downloaded.stdout)["Dir"])
        for file in self.files:
            shutil.copy(source / file, directory)

    @property
    def version(self) -> str:
        return self.module.rpartition("@")[2]


class EarlierRelease(NamedTuple):
    """Builds an earlier release of this project from its commit, in a venv with the packages that it was locked to."""

    release: str
    commit: str  # a clone may lack the tag
    about: str

    def install(self, directory: Path) -> None:
        _require("git")
        tree, python = directory / "tree", directory / "venv" / "bin" / "python"
        self._unpack(tree)
        pip = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--python", str(python), "install"]
        locked = ["--require-hashes", "--only-binary", ":all:", "-r", str(tree / "requirements-runtime.lock")]
        for step in (
            [sys.executable, "-m", "venv", "--without-pip", str(directory / "venv")],
            [*pip, *locked],
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)],
            [*pip, "--no-deps", "--no-index", str(directory / f"leasehold-{self.release}-py3-none-any.whl")],
        ):
            done = _run(step, tree)
            if done.returncode != 0:
                raise CannotFetch(f"release {self.release} cannot be built ({_last_line(done)})")
        shutil.rmtree(tree)

    def _unpack(self, tree: Path) -> None:
        packed = tree.with_suffix(".tar")
        archived = _run(["git", "archive", "--output", str(packed), self.commit], TOOLS.parent)
        if archived.returncode != 0:
            raise LacksHistory(
                f"this clone lacks the commit {self.commit[:12]} of release {self.release} ({_last_line(archived)}); "
                "run `git fetch --unshallow --tags`"
            )
        with tarfile.open(packed) as archive:
            archive.extractall(tree, filter="data")
        packed.unlink()

    @property
    def version(self) -> str:
        return f"{self.commit[:12]}-{sys.version_info.major}.{sys.version_info.minor}"


class MavenArtifacts(NamedTuple):
    """Copies an artifact and all that it needs, as a folder's pom.xml says, into `lib/`. Maven compares checksums."""

    folder: Path
    about: str

    def install(self, directory: Path) -> None:
        _require("java", "mvn")
        shutil.copy(self.folder / "pom.xml", directory)
        copied = _run(["mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=lib"], directory)
        if copied.returncode != 0:
            raise CannotFetch(f"mvn cannot fetch {self.folder.name} ({_last_line(copied)})")

    @property
    def version(self) -> str:
        """Return a text that changes with the artifacts."""
        return hashlib.sha256((self.folder / "pom.xml").read_bytes()).hexdigest()[:12]


class Wheels(NamedTuple):
    """Installs packages of Python into a directory of their own, for a process that has it in its path."""

    requirements: Sequence[str]  # with their versions
    about: str

    def install(self, directory: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--quiet", "--no-input", "install", "--no-deps", "--target", str(directory)]
        installed = _run([*pip, *self.requirements], directory)
        if installed.returncode != 0:
            raise CannotFetch(f"pip cannot install {self.requirements[0]} ({_last_line(installed)})")

    @property
    def version(self) -> str:
        return self.requirements[0].rpartition("==")[2]


class InstalledPackages(NamedTuple):
    """Installs packages of Debian into the machine as root, unless the machine has what they bring."""

    packages: Sequence[str]
    find: Callable[[], Path | None]
    about: str

    def install(self, name: str) -> Path:
        if found := self.find():
            return found
        _require("apt-get")
        if os.geteuid() != 0:
            raise CannotFetch(f"this machine has no {name}, and only root can install it: `./dev parts {name}` as root")
        with _turn(APT_STATE):
            return self.find() or self._install(name)

    def _install(self, name: str) -> Path:
        _run(["apt-get", "update"], APT_STATE)  # without the network, the lists that are there have to do
        installed = _run(apt_install(self.packages), APT_STATE)
        if installed.returncode != 0:
            raise CannotFetch(f"apt-get cannot install {name} ({_last_line(installed)})")
        if found := self.find():
            return found
        raise CannotFetch(f"apt-get installed {' '.join(self.packages)}, and {name} is still missing")


def apt_install(packages: Sequence[str]) -> Sequence[str]:
    """Return the command that installs packages without a question, and waits for another apt-get or dpkg."""
    waiting = f"DPkg::Lock::Timeout={TIMEOUT_S}"
    return ["apt-get", "install", "-y", "--no-install-recommends", "-o", waiting, *packages]


def _find_program(*names: str) -> Path | None:
    """Return the first of these programs that the machine has."""
    return next((Path(found) for name in names if (found := shutil.which(name))), None)


def _find_libraries(*names: str) -> Path | None:
    """Return the first library if the machine has all of them."""
    found = [ctypes.util.find_library(name) for name in names]
    return Path(found[0]) if found[0] and all(found) else None


Unpacked = DebianPackages | EarlierRelease | GoModuleFiles | GoProgram | MavenArtifacts | NpmPackages | Wheels
TABLE: Mapping[str, InstalledPackages | Unpacked] = {
    "redis": DebianPackages(
        ("redis-server", "redis-tools", "redis-sentinel", "libjemalloc2", "liblzf1", "libatomic1"),
        ("redis-server", "redis-sentinel", "redis-cli"),
        "Debian's Redis with Sentinel, Cluster and TLS, for tests of stores that fail over",
    ),
    "pgbouncer": DebianPackages(
        ("pgbouncer", "libevent-2.1-7", "libc-ares2"),
        ("pgbouncer",),
        "PgBouncer, for a test that a coordinator refuses it in transaction mode",
    ),
    "faketime": DebianPackages(
        ("libfaketime", "faketime"),
        ("faketime",),
        "libfaketime, for tests of stores whose clock is hours ahead or behind",
    ),
    "prometheus": DebianPackages(
        ("prometheus",),
        ("prometheus", "promtool"),
        "Prometheus and promtool, for tests of the metrics, the alerts and the dashboards",
    ),
    "postgresql": InstalledPackages(
        ("postgresql",),
        lambda: next(Path("/usr/lib/postgresql").glob("*/bin/postgres"), None),
        "Debian's PostgreSQL, which has TLS, for a test that types the guide of three regions",
    ),
    "chromium": InstalledPackages(
        ("chromium",),
        partial(_find_program, "chromium", "google-chrome"),
        "a browser, for tests that look at printed pages",
    ),
    "libreoffice": InstalledPackages(
        ("libreoffice-calc",),
        partial(_find_program, "soffice", "libreoffice"),
        "LibreOffice Calc, for tests that open spreadsheets",
    ),
    "pango": InstalledPackages(
        ("libpango-1.0-0", "libpangoft2-1.0-0", "libharfbuzz-subset0", "fonts-dejavu-core"),
        partial(_find_libraries, "pango-1.0", "pangoft2-1.0", "harfbuzz-subset"),
        "the libraries and a font with which WeasyPrint makes PDFs",
    ),
    "helm": GoProgram(
        "helm.sh/helm/v3/cmd/helm@v3.22.0", "helm", "Helm, for tests of the chart; needs Go on the machine"
    ),
    "h2spec": GoProgram(
        "github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible",
        "h2spec",
        "h2spec, for a test that the gRPC door speaks HTTP/2 as the standard has it; needs Go on the machine",
    ),
    "istio-crds": GoModuleFiles(
        "istio.io/api@v1.31.1",
        ("kubernetes/customresourcedefinitions.gen.yaml",),
        "the resource definitions of Istio, for a test of the snippet; needs Go on the machine",
    ),
    "envoy-gateway-crds": GoModuleFiles(
        "github.com/envoyproxy/gateway@v1.9.1",
        ("charts/gateway-helm/charts/crds/crds/generated/gateway.envoyproxy.io_envoypatchpolicies.yaml",),
        "those of Envoy Gateway",
    ),
    "release-before": EarlierRelease(
        "0.1.0",
        "cf7f0e2195979c48dfcf717c6b8add28d93d2ae3",
        "the release before this one, for tests of upgrades; needs its commit in the clone",
    ),
    "kafka": MavenArtifacts(TOOLS / "kafka", "a Kafka broker, for tests of the decision log; needs Java 17 and Maven"),
    "clickhouse": Wheels(
        ("chdb-core==26.9.0",),
        "ClickHouse in a process (534 MB), for tests of the documented tables",
    ),
    "typescript": NpmPackages(
        TOOLS.parent / "clients" / "typescript",
        "the compiler, linter and generator of the TypeScript client; needs node and npm on the machine",
    ),
    "pyright": NpmPackages(
        TOOLS / "pyright", "Pyright, for a test of the client's types; needs node and npm on the machine"
    ),
}


def fetch(name: str) -> Path:
    """Return where a part is: a directory, a program or a library. Fetch it first if it is missing.

    Raise CannotFetch.
    """
    part = TABLE[name]
    try:
        return part.install(name) if isinstance(part, InstalledPackages) else _unpacked(name, part)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotFetch(f"the part {name} cannot be fetched: {error}") from error


def find_or_fetch_without_root(name: str) -> Path:
    """Return where a part is, but install nothing into the machine. Raise CannotFetch."""
    part = TABLE[name]
    if not isinstance(part, InstalledPackages):
        return fetch(name)
    if found := part.find():
        return found
    raise CannotFetch(f"this machine has no {name}: install it with `./dev parts {name}`, as root")


def _unpacked(name: str, packages: Unpacked) -> Path:
    version = "" if isinstance(packages, DebianPackages) else f"-{packages.version}"
    part, lock = PARTS / f"{name}{version}", PARTS / f"{name}.lock"
    PARTS.mkdir(exist_ok=True)
    lock.touch()
    with _turn(lock):
        if not part.exists():
            with tempfile.TemporaryDirectory(dir=PARTS) as unfinished:
                directory = Path(unfinished) / name
                directory.mkdir()
                packages.install(directory)
                directory.rename(part)
    return part


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the lock of a file or directory that exists."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _require(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            raise CannotFetch(f"{tool} is missing, so its packages cannot be fetched")


def _run(
    command: Sequence[str], directory: Path, environ: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end. Packages may ask nothing."""
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", **(environ or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def _last_line(done: "subprocess.CompletedProcess[str]") -> str:
    return (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def main(names: Sequence[str]) -> int:
    unknown = sorted(set(names) - set(TABLE))
    if unknown or not names:
        print(f"there is no part {unknown[0]!r}" if unknown else "name a part:")
        print("\n".join(f"  {name:14} {part.about}" for name, part in TABLE.items()))
        return 2
    for name in names:
        try:
            print(f"{name}: {fetch(name)}")
        except CannotFetch as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
