"""Programs that only tests need and no wheel brings: `./dev parts redis` fetches one into `.parts/`, once.

It needs the standard library alone. A part appears under its name when it is complete, so one that was interrupted is
fetched again. Processes that want the same part wait for each other.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PARTS = Path(__file__).parent.parent / ".parts"
TIMEOUT_S = 300


class CannotFetch(Exception):
    """Says in one sentence what is missing, and what to do."""


class DebianPackages(NamedTuple):
    """Unpacks packages of Debian or Ubuntu without installing them, and so without root."""

    packages: Sequence[str]
    programs: Sequence[str]  # each becomes a script in `bin/`
    about: str

    def install(self, directory: Path) -> None:
        for tool in ("apt-get", "dpkg"):
            if shutil.which(tool) is None:
                raise CannotFetch(f"{tool} is missing, so its packages cannot be fetched")
        downloaded = _run(["apt-get", "download", *self.packages], directory)
        if downloaded.returncode != 0 and os.geteuid() == 0:  # an image may come without lists of packages
            _run(["apt-get", "update"], directory)
            downloaded = _run(["apt-get", "download", *self.packages], directory)
        if downloaded.returncode != 0:
            reason = (downloaded.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise CannotFetch(f"apt-get cannot download its packages ({reason}); run `apt-get update` as root")
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
    here = '"$(dirname "$(dirname "$(readlink -f "$0")")")"'
    lines = [
        "#!/bin/sh",
        f"here={here}",
        'export LD_LIBRARY_PATH="$(echo "$here"/usr/lib/*-linux-gnu)"',
        f'exec "$here/usr/bin/{program}" "$@"',
    ]
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o755)
    if _run([str(script), "--version"], directory).returncode != 0:
        raise CannotFetch(f"{program} does not run on this machine")


TABLE: Mapping[str, DebianPackages] = {
    "redis": DebianPackages(
        ("redis-server", "redis-tools", "redis-sentinel", "libjemalloc2", "liblzf1", "libatomic1"),
        ("redis-server", "redis-sentinel", "redis-cli"),
        "Debian's Redis with Sentinel, Cluster and TLS, for tests of stores that fail over",
    ),
}


def fetch(name: str) -> Path:
    """Return the directory of a part, which is fetched first if it is not there. Raise CannotFetch."""
    part = PARTS / name
    PARTS.mkdir(exist_ok=True)
    with (PARTS / f"{name}.lock").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not part.exists():
            with tempfile.TemporaryDirectory(dir=PARTS) as unfinished:
                directory = Path(unfinished) / name
                directory.mkdir()
                try:
                    TABLE[name].install(directory)
                except (OSError, subprocess.TimeoutExpired) as error:
                    raise CannotFetch(f"the part {name} cannot be fetched: {error}") from error
                directory.rename(part)
    return part


def _run(command: Sequence[str], directory: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def main(names: Sequence[str]) -> int:
    unknown = sorted(set(names) - set(TABLE))
    if unknown or not names:
        print(f"there is no part {unknown[0]!r}" if unknown else "name a part:")
        print("\n".join(f"  {name:8} {part.about}" for name, part in TABLE.items()))
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
