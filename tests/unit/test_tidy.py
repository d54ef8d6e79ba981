"""House rules that no linter knows, as a table of findings for a file's name and text.

A pattern is written so that it does not find itself here (`T[O]DO`).
"""

import ast
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).parents[2]
NO_TEXT = {".venv.lock", ".git"}  # the latter is a file in a worktree
NOT_OURS = r"^\.(?!ci$)|^__pycache__$|^node_modules$|^dist$|^site$"
TEXT = {
    "",
    ".cfg",
    ".env",
    ".html",
    ".ini",
    ".json",
    ".lock",
    ".lua",
    ".md",
    ".mako",
    ".py",
    ".sh",
    ".sql",
    ".toml",
    ".yaml",
    ".yml",
}
MAX_FUNCTION_LINES = 60
PRODUCT = ("coordinator", "leasehold", "migrations", "protocol", "regional_agent", "web")
MAX_MODULES = 16  # in one folder of the product
MIRRORING = ("tests/unit", "tests/integration")
MIRRORED = ("coordinator", "regional_agent")
WITHOUT_MIRROR = {"coordinator/state_machine"}  # folders of tests that are about all of a service

# Each rule is two regular expressions: one for paths, and one for lines that are refused there.
REFUSED_LINES = {
    "a path of somebody's machine": (r"", r"(?<![\w.}])/(wor[k]/|roo[t]/|hom[e]/\w|User[s]/\w|tm[p]/play)"),
    "the address of a package index": (
        r"",
        r"pyp[i]\.org|pythonhoste[d]\.org|--(extra-)?index-ur[l]|find-link[s] http",
    ),
    "a conflict marker": (r"", r"^(<{7}|={7}|>{7})( |$)"),
    "white space at the end of a line": (r"", r"[ \t\r]+$"),
    "a tab": (r"", r"\t"),
    "work put off without an issue": (r"", r"\b(T[O]DO|FIXM[E]|XX[X])\b"),
    "a promise in place of a check": (r"\.py$", r"#\s*type:\s*ignor[e](?!\[)|#\s*noq[a](?!: [A-Z]+\d+)"),
}
REFUSED_NAMES = r"(^|/)(utils?|helpers?|manager|service|common|misc)\.py$"
# Words that begin a fragment or a riddle in place of a sentence, as "What remains." or "Likewise."
NO_SENTENCES = r"(As|At|By|How|Likewise|Nobody|Nothing|Of|So|That|Those|What|Whether|Where|Whoever|Why)\b"
LUA_HEADER = ("-- KEYS", "-- ARGV", "-- Returns ")


def findings(path: PurePath, text: str) -> Iterator[str]:
    """Return all findings of one file."""
    if re.search(REFUSED_NAMES, str(path)):
        yield f"{path}: a name that says nothing"
    for number, line in enumerate(text.split("\n"), start=1):
        for what, (where, pattern) in REFUSED_LINES.items():
            if re.search(where, str(path)) and re.search(pattern, line):
                yield f"{path}:{number}: {what}"
    if path.suffix == ".py":
        yield from python_findings(path, ast.parse(text))
    if path.suffix == ".lua":
        yield from lua_findings(path, text)


def python_findings(path: PurePath, module: ast.Module) -> Iterator[str]:
    if module.body and not ast.get_docstring(module):
        yield f"{path}: a module without a docstring"
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from docstring_findings(path, node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.body[0].lineno + 1  # a signature may be as long as it needs
            if lines > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines"
        if isinstance(node, ast.Call) and path.parts[0] == "tests" and ast.unparse(node.func) == "time.sleep":
            yield f"{path}:{node.lineno}: a test that waits for the clock"


def docstring_findings(path: PurePath, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[str]:
    if re.match(NO_SENTENCES, ast.get_docstring(node) or ""):
        yield f"{path}:{node.lineno}: {node.name} has a docstring that is no sentence"


def lua_findings(path: PurePath, text: str) -> Iterator[str]:
    """Yield what the header lacks of its contract: purpose, keys, arguments, result."""
    header = [line for line in text.split("\n\nlocal ", 1)[0].splitlines() if line.startswith("--")]
    if not text.startswith("-- "):
        yield f"{path}: a script that does not begin with what it does"
    for word in LUA_HEADER:
        if not any(line.startswith(word) for line in header):
            yield f"{path}: a header without '{word.strip(' -')}'"


def crowded_folders(paths: Collection[PurePath]) -> Iterator[str]:
    """Yield the folders of the product that have too many modules."""
    modules = Counter(path.parent for path in paths if path.suffix == ".py" and path.parts[0] in PRODUCT)
    for folder, count in modules.items():
        if count - (folder / "__init__.py" in paths) > MAX_MODULES:
            yield f"{folder}: {count} modules"


def unmirrored_folders(paths: Collection[PurePath]) -> Iterator[str]:
    """Yield the folders of tests that mirror no folder of the product."""
    folders = {str(path.parent) for path in paths if path.suffix == ".py"}
    for root in MIRRORING:
        for folder in sorted(each.removeprefix(f"{root}/") for each in folders if each.startswith(f"{root}/")):
            is_mirrored = folder.partition("/")[0] in MIRRORED
            if is_mirrored and folder not in folders | WITHOUT_MIRROR:
                yield f"{root}/{folder}: there is no {folder}"


def our_files() -> Iterator[Path]:
    for directory, names, files in os.walk(ROOT):
        names[:] = [name for name in names if not re.search(NOT_OURS, name)]
        yield from (Path(directory, name) for name in files if PurePath(name).suffix in TEXT and name not in NO_TEXT)


def clashes(migrations: Mapping[str, str]) -> Iterator[str]:
    """Yield migrations that take the place of another, or whose number is not their revision's."""
    taken: dict[str, str] = {}
    for name, text in sorted(migrations.items()):
        said = dict(re.findall(r'^(revision|down_revision) = (?:"(\w+)"|None)$', text, re.MULTILINE))
        if said.get("revision") != name.partition("_")[0]:
            yield f"{name}: its revision is {said.get('revision')}"
        for what in (f"number {name.partition('_')[0]}", f"place after {said.get('down_revision')}"):
            if what in taken:
                yield f"{name}: the {what} is {taken[what]}'s"
            taken[what] = name


def test_no_two_migrations_are_one() -> None:
    folder = ROOT / "migrations" / "versions"
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    assert found
    assert not list(clashes(found))


@pytest.mark.parametrize(
    ("name", "revision", "before", "what"),
    [
        ("0002_b.py", '"0002"', '"0001"', None),
        ("0001_b.py", '"0001"', '"0000"', "0001_b.py: the number 0001 is 0001_a.py's"),
        ("0002_b.py", '"0001"', '"0001"', "0002_b.py: its revision is 0001"),
        ("0002_b.py", '"0002"', "None", "0002_b.py: the place after  is 0001_a.py's"),
    ],
)
def test_migrations_that_clash_are_found(name: str, revision: str, before: str, what: str | None) -> None:
    first = 'revision = "0001"\ndown_revision = None\n'
    second = f"revision = {revision}\ndown_revision = {before}\n"
    assert list(clashes({"0001_a.py": first, name: second})) == ([what] if what else [])


def test_the_repository_is_tidy() -> None:
    found = [
        finding
        for path in our_files()
        for finding in findings(path.relative_to(ROOT), path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n" + "\n".join(sorted(found))


def test_no_folder_is_crowded_and_tests_lie_beside_their_capability() -> None:
    paths = {path.relative_to(ROOT) for path in our_files()}
    assert not [*crowded_folders(paths), *unmirrored_folders(paths)]


def test_a_crowded_folder_and_a_folder_without_a_mirror_are_found() -> None:
    paths = {PurePath("web", f"module_{number}.py") for number in range(MAX_MODULES + 1)}
    assert list(crowded_folders(paths)) == [f"web: {MAX_MODULES + 1} modules"]
    assert not list(crowded_folders(set(list(paths)[1:]) | {PurePath("web/__init__.py")}))
    strange = PurePath("tests/unit/coordinator/people/test_a.py")
    assert list(unmirrored_folders({strange})) == ["tests/unit/coordinator/people: there is no coordinator/people"]
    assert not list(unmirrored_folders({strange, PurePath("coordinator/people/routes.py")}))


def test_every_file_of_the_repository_is_checked() -> None:
    seen = {str(path.relative_to(ROOT)) for path in our_files()}
    assert {"dev", "README.md", "pyproject.toml", ".ci/run", "lua/check.lua", "protocol/lease.py"} <= seen


@pytest.mark.parametrize(
    ("path", "text", "what"),
    [
        ("README.md", "see /roo" + "t/notes", "a path of somebody's machine"),
        ("requirements.lock", "--index-ur" + "l https://example.org", "the address of a package index"),
        ("a.md", "<<<<<<" + "< ours", "a conflict marker"),
        ("a.md", "======" + "=", "a conflict marker"),
        ("a.yaml", "a: 1 ", "white space at the end of a line"),
        ("a.yaml", "a:\t1", "a tab"),
        ("a.lua", "-- TO" + "DO later", "work put off without an issue"),
        ("a.py", "import a  # noq" + "a", "a promise in place of a check"),
        ("tests/a.py", "time.sleep(1)", "a test that waits for the clock"),
        ("coordinator/utils.py", "", "a name that says nothing"),
        ("a.py", "x = 1", "a module without a docstring"),
        ("a.py", '"""."""\n\n\ndef f():\n' + "    x = 1\n" * 61, "f has 61 lines"),
        ("a.py", '"""."""\n\n\nclass A:\n    """What remains."""\n', "A has a docstring that is no sentence"),
        ("a.lua", "return 1", "a script that does not begin with what it does"),
        ("a.lua", "-- Adds.\n-- KEYS[1]  a\n-- Returns  1\n", "a header without 'ARGV'"),
    ],
)
def test_an_untidy_file_is_found(path: str, text: str, what: str) -> None:
    assert any(what in finding for finding in findings(PurePath(path), text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a/__init__.py", ""),
        ("a.py", '"""Adds."""\n\nx = 1  # noqa: S101 - because\n'),
        ("a.lua", "-- Adds.\n--\n-- KEYS     none\n-- ARGV[1]  a\n-- Returns  a\n\nlocal a = ARGV[1]\n"),
        ("tests/a.py", '"""Spawns."""\n\nSLEEP = "time.sleep(1)"\n'),
        ("a.md", "`/v1/work/` and ==== and helpers.py in a sentence"),
    ],
)
def test_a_tidy_file_is_left_alone(path: str, text: str) -> None:
    assert not list(findings(PurePath(path), text))
