"""Build the wheel: every package of the repository becomes a part of the one package `leasehold`.

The repository has its packages side by side (`coordinator`, `protocol`, `migrations`, …). In site-packages such names
would hide modules of the application that installs the client, or be hidden by them. So the wheel has them inside
`leasehold`, and this hook rewrites their absolute imports: `from protocol.check import …` becomes
`from leasehold.protocol.check import …`. Nothing else of a file is changed, so lines in tracebacks stay the same.
"""

import ast
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OUTER = "leasehold"
INNER = ("coordinator", "lua", "migrations", "protocol", "regional_agent", "web")


class Leasehold(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # the checkout is used as it is
            return
        self._staged = Path(tempfile.mkdtemp())
        root = Path(self.root)
        stage(root, self._staged)
        build_data["force_include"][str(self._staged)] = OUTER

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if version != "editable":
            shutil.rmtree(self._staged)


def stage(root: Path, target: Path) -> None:
    """Copy the packages to where the wheel has them, with their imports rewritten."""
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / OUTER, target, ignore=caches, dirs_exist_ok=True)
    for name in INNER:
        shutil.copytree(root / name, target / name, ignore=caches)
    for path in target.rglob("*.py"):
        path.write_text(with_inner_imports(path.read_text(encoding="utf-8")), encoding="utf-8")


def with_inner_imports(source: str) -> str:
    """Rewrite each import of an inner package."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_inner(node.module or ""):
            _edit(lines, node, r"from\s+", f"from {OUTER}.")
        elif isinstance(node, ast.Import) and any(_is_inner(alias.name) for alias in node.names):
            [alias] = node.names
            if "." not in alias.name:
                _edit(lines, node, r"import\s+", f"from {OUTER} import ")
            elif alias.asname:
                _edit(lines, node, r"import\s+", f"import {OUTER}.")
            else:
                raise ValueError(f"`import {alias.name}` cannot be rewritten: write `from … import …`")
    return "".join(lines)


def _is_inner(module: str) -> bool:
    return module.partition(".")[0] in INNER


def _edit(lines: list[str], node: ast.stmt, pattern: str, replacement: str) -> None:
    line = lines[node.lineno - 1].encode()  # ast counts in bytes
    before, rest = line[: node.col_offset].decode(), line[node.col_offset :].decode()
    lines[node.lineno - 1] = before + re.sub(pattern, replacement, rest, count=1)
