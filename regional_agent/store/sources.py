"""The scripts of lua/ as they are sent to a store: each joined with the parts that it requires.

A store runs one text and knows no modules, so `require('parts/clock')` in a script is replaced by that file, as a
function that is called on the spot: what a part ends with (`return …`) is what requiring it gives, and its local names
stay its own. `require('algorithms/*')` is a function of a name and arguments that runs the file of that name in the
directory, with `...` as its arguments. A part costs nothing until it is reached. For luacheck, and for a reader, every
file is Lua as it stands.
"""

import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

LUA = Path(__file__).parent.parent.parent / "lua"
_REQUIRED = re.compile(r"require\('([a-z_/]+)(/\*)?'\)")


@functools.cache
def sources() -> Mapping[str, bytes]:
    """Every script by its name. Read once: a process runs what it began with, in all of its cells."""
    return MappingProxyType({path.stem: _joined(path).encode() for path in sorted(LUA.glob("*.lua"))})


@functools.cache
def digests() -> Mapping[str, str]:
    """What a store calls each of them."""
    return MappingProxyType({name: hashlib.sha1(source).hexdigest() for name, source in sources().items()})  # noqa: S324


def _joined(path: Path) -> str:
    return _REQUIRED.sub(_replacement, path.read_text(encoding="utf-8"))


def _replacement(required: re.Match[str]) -> str:
    name, is_directory = required.groups()
    return _one_of(LUA / name) if is_directory else f"(function()\n{_joined(LUA / f'{name}.lua')}end)()"


def _one_of(directory: Path) -> str:
    branches = (
        f"if name == '{path.stem}' then return (function(...)\n{_joined(path)}end)(...) end\n"
        for path in sorted(directory.glob("*.lua"))
    )
    return f"(function(name, ...)\n{''.join(branches)}end)"
