"""Generate the client for threads, `leasehold/client/_sync`, from the one for event loops, `leasehold/client/_async`.

    python -m tools.sync_client          # write the generated files
    python -m tools.sync_client --check  # name those that are out of date

It drops `async` and `await`, unwraps `Awaitable[...]`, and renames `AsyncX` to `X`, token by token.
"""

import io
import itertools
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, TARGET = ROOT / "leasehold/client/_async", ROOT / "leasehold/client/_sync"
HEADER = "# Generated from leasehold/client/_async/{name} by `./dev sync-client`: change that file instead.\n"
NAMES = {
    "_async": "_sync",
    "asyncio_io": "thread_io",
    "asynccontextmanager": "contextmanager",
    "AbstractAsyncContextManager": "AbstractContextManager",
    "AsyncIterator": "Iterator",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
}
DOCSTRINGS = {"for event loops, and the source of `leasehold/client/_sync`": "for threads"}


def to_sync(source: str) -> str:
    """Translate a module. Tokens keep their lines, so that the generated code is laid out as its source."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    lines = source.splitlines(keepends=True)
    edits = [*_dropped_words(tokens), *_unwrapped_awaitables(tokens), *_renamed(tokens)]
    for (row, start), end, text in sorted(edits, reverse=True):
        lines[row - 1] = lines[row - 1][:start] + text + lines[row - 1][end:]
    return "".join(lines)


Edit = tuple[tuple[int, int], int, str]  # where, the column behind what is replaced, and by what


def _dropped_words(tokens: list[tokenize.TokenInfo]) -> Iterator[Edit]:
    for word, following in itertools.pairwise(tokens):
        if word.string in ("async", "await"):
            yield word.start, following.start[1], ""


def _unwrapped_awaitables(tokens: list[tokenize.TokenInfo]) -> Iterator[Edit]:
    for index, token in enumerate(tokens):
        if token.string != "Awaitable":
            continue
        if tokens[index + 1].string == ",":  # in an import
            yield token.start, tokens[index + 2].start[1], ""
        else:
            closing = tokens[_closing_bracket(tokens, index + 1)]
            yield token.start, tokens[index + 1].end[1], ""
            yield closing.start, closing.end[1], ""


def _closing_bracket(tokens: list[tokenize.TokenInfo], opening: int) -> int:
    depth = 0
    for index in range(opening, len(tokens)):
        depth += {"[": 1, "]": -1}.get(tokens[index].string, 0)
        if depth == 0:
            return index
    raise ValueError("Awaitable[ is never closed")


def _renamed(tokens: list[tokenize.TokenInfo]) -> Iterator[Edit]:
    for token in tokens:
        if token.type == tokenize.NAME and token.string != "Awaitable":
            new = NAMES.get(token.string, token.string.removeprefix("Async"))
        elif token.type == tokenize.STRING and token.string[1:].startswith("Async"):
            new = token.string[0] + token.string[1:].removeprefix("Async")
        elif token.type == tokenize.STRING and any(words in token.string for words in DOCSTRINGS):
            new = next(token.string.replace(a, b) for a, b in DOCSTRINGS.items() if a in token.string)
        else:
            continue
        if new != token.string:
            yield token.start, token.end[1], new


def generated() -> dict[Path, str]:
    return {
        TARGET / path.name: _formatted(HEADER.format(name=path.name) + to_sync(path.read_text()), path.name)
        for path in sorted(SOURCE.glob("*.py"))
    }


def _formatted(code: str, name: str) -> str:
    """Format the code and sort its imports as `./dev check` wants them."""
    ruff, file = [sys.executable, "-m", "ruff"], str(TARGET / name)
    for command in (
        [*ruff, "check", "--quiet", "--fix-only", "--select", "I", "--stdin-filename", file, "-"],
        [*ruff, "format", "--quiet", "--stdin-filename", file, "-"],
    ):
        code = subprocess.run(command, input=code, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return code


def main(arguments: list[str]) -> int:
    wanted = generated()
    found = {path: path.read_text() for path in TARGET.glob("*.py")}
    stale = sorted(path for path in wanted.keys() | found.keys() if wanted.get(path) != found.get(path))
    if arguments == ["--check"]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run ./dev sync-client")
        return 1 if stale else 0
    TARGET.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(wanted[path]) if path in wanted else path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
