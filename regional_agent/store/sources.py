"""The scripts of lua/ as they are sent to a store: each joined with the parts that it requires.

A store runs one text and knows no modules, so `require('parts/clock')` in a script is replaced by that file, as a
function that is called at once: its result is what the part returns, and its local names stay its own.
`require('algorithms/*')` is a function of a name and arguments that runs the file of that name in the directory, with
`...` as its arguments. A part costs nothing until it is reached. For the linter, and for a reader, every file is valid
Lua.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

LUA = Path(__file__).parent.parent.parent / "lua"
_REQUIRED = re.compile(r"require\('([a-z_/]+)(/\*)?'\)")
ReadFile = Callable[[Path], str]


def read_file(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def sources() -> Mapping[str, bytes]:
    """Return every script by name. They are read once: a process uses the same texts in all of its cells."""
    return assemble_scripts(read_file)


@functools.cache
def digests() -> Mapping[str, str]:
    """Return the SHA-1 digests by which a store knows the scripts."""
    return MappingProxyType({name: hashlib.sha1(source).hexdigest() for name, source in sources().items()})  # noqa: S324


def assemble_scripts(read: ReadFile) -> Mapping[str, bytes]:
    """Assemble every script from files as `read` returns them: tests change some of them."""
    return MappingProxyType({path.stem: join_parts(read(path), read).encode() for path in sorted(LUA.glob("*.lua"))})


def join_parts(text: str, read: ReadFile = read_file) -> str:
    """Replace each `require` of a text by the file that it names."""
    return _REQUIRED.sub(lambda required: _replacement(required, read), text)


def _replacement(required: re.Match[str], read: ReadFile) -> str:
    name, is_directory = required.groups()
    if is_directory:
        return _one_of(LUA / name, read)
    return f"(function()\n{join_parts(read(LUA / f'{name}.lua'), read)}end)()"


def _one_of(directory: Path, read: ReadFile) -> str:
    branches = (
        f"if name == '{path.stem}' then return (function(...)\n{join_parts(read(path), read)}end)(...) end\n"
        for path in sorted(directory.glob("*.lua"))
    )
    return f"(function(name, ...)\n{''.join(branches)}end)"
