"""Generate the calls of the Go and TypeScript clients from docs/openapi/agent.json.

    python -m tools.clients          # write the generated files
    python -m tools.clients --check  # name those that are out of date

The generators are pinned, with hashes: oapi-codegen in `clients/go/tools.mod`, openapi-typescript in
`clients/typescript/package-lock.json`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tools.parts import CannotFetch, fetch

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "openapi" / "agent.json"
GO = ROOT / "clients" / "go"
TYPESCRIPT = ROOT / "clients" / "typescript"


def generate_go(target: Path) -> None:
    run(
        ["go", "tool", f"-modfile={GO}/tools.mod", "oapi-codegen", "-config", "generate.yaml", "-o", target, DOCUMENT],
        GO / "api",
    )


def generate_typescript(target: Path) -> None:
    generator = fetch("typescript") / "node_modules" / "openapi-typescript" / "bin" / "cli.js"
    run(["node", generator, DOCUMENT, "--output", target, "--alphabetize"], TYPESCRIPT)


GENERATED: Mapping[Path, Callable[[Path], None]] = {
    GO / "api" / "api.gen.go": generate_go,
    TYPESCRIPT / "src" / "api.ts": generate_typescript,
}


def generated(path: Path) -> str:
    """Return what a generated file has to contain. Raise CannotFetch if the toolchain is missing."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / path.name
        GENERATED[path](target)
        return target.read_text(encoding="utf-8")


def run(command: Sequence[str | Path], directory: Path, **variables: str) -> str:
    """Run a program of a toolchain, and return what it prints. Raise CannotFetch if the machine does not have it."""
    program = shutil.which(command[0])
    if program is None:
        raise CannotFetch(f"this machine has no {command[0]}")
    done = subprocess.run(
        [program, *command[1:]],
        cwd=directory,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, [str(each) for each in command], done.stdout)
    return done.stdout


def main(arguments: list[str]) -> int:
    try:
        stale = {path: text for path in GENERATED if (text := generated(path)) != path.read_text(encoding="utf-8")}
    except CannotFetch as error:
        print(f"clients: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(error.output, file=sys.stderr)
        return 1
    for path, text in stale.items():
        if arguments == ["--check"]:
            print(f"{path.relative_to(ROOT)} is out of date: run ./dev clients")
        else:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and arguments == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
