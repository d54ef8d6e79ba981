"""The scripts of lua/ as one library of functions, which a store keeps and runs by FCALL.

A store knows no files. So each file becomes a function of the library's text, which `require` runs at the first use:
its result is what the file returns, and its local names stay its own. A file, with all its closures and tables, is made
once in a store's life and not once in a call. For the linter, and for a reader, every file is valid Lua.

The library's name, which is also part of each function's name, has the release and a digest of the text. So different
texts never share a name, several versions work side by side in one store, and an agent calls the functions that it was
shipped with, whatever others have loaded.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from protocol.compatibility.releases import RELEASE

LUA = Path(__file__).parent.parent.parent / "lua"
PREFIX = "leasehold_"
_DIGEST_LENGTH = 12
_FLAGS = re.compile(r"^-- Flags +([a-z-]+):", re.MULTILINE)
_COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)
_NO_NAME = re.compile(r"[^A-Za-z0-9]+")
ReadFile = Callable[[Path], str]

# While a library is loaded, a store offers nothing but `redis.register_function`: so the files run at the first call.
# They see the globals that they use as local names, for a lookup of a global costs several times as much.
_HEAD = """\
local KEYS, ARGV -- of the call that runs
local require

local function start()
local redis, struct, cjson = redis, struct, cjson
local math, string, table = math, string, table
local error, ipairs, pairs, pcall = error, ipairs, pairs, pcall
local tonumber, tostring, type, unpack = tonumber, tostring, type, unpack
local files, results = {}, {}

function require(name)
  if results[name] == nil then results[name] = files[name]() end
  return results[name]
end

"""
_FOOT = """\
end

local function register(name, script, flags)
  local run
  redis.register_function({function_name = name, flags = flags, callback = function(keys, args)
    KEYS, ARGV = keys, args
    if not run then
      if not require then start() end
      run = require(script)
    end
    return run()
  end})
end

"""


class Library(NamedTuple):
    """A library as it is loaded into a store."""

    name: str
    source: bytes
    functions: Mapping[str, str]  # the name of each script's function

    def with_text(self, change: Callable[[str], str]) -> "Library":
        """Return the library with another text, and so with another name."""
        return _named(change(self.source.decode().partition("\n")[2].replace(self.name, "%LIBRARY%")))


def read_file(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def shipped_library() -> Library:
    """Return the library of this release. It is read once: a process uses the same in all of its cells."""
    return read_library(LUA)


@functools.cache
def library_in(directory: Path) -> Library:
    """Return the library of a directory of scripts: another version than this release's."""
    return read_library(directory)


def read_library(directory: Path, read: ReadFile = read_file) -> Library:
    """Assemble a directory of scripts into a library. Raises ValueError if a script is missing."""
    scripts = sorted(directory.glob("*.lua"))
    missing = {path.name for path in LUA.glob("*.lua")} - {path.name for path in scripts}
    if missing:
        raise ValueError(f"{directory} has no {', '.join(sorted(missing))}")
    registered = (f"register('%LIBRARY%_{path.stem}', '{path.stem}', {{{_flags(read(path))}}})\n" for path in scripts)
    return _named(f"{_HEAD}{assemble_files(directory, read)}{_FOOT}{''.join(registered)}")


def assemble_files(directory: Path = LUA, read: ReadFile = read_file) -> str:
    """Return Lua that defines each file of a directory, and each folder, as an entry of the table `files`."""
    return "".join(_entries(directory, read))


def _entries(directory: Path, read: ReadFile) -> Iterator[str]:
    names = [path.relative_to(directory).with_suffix("").as_posix() for path in sorted(directory.rglob("*.lua"))]
    for name in names:
        yield f"files['{name}'] = function()\n{_COMMENT.sub('', read(directory / f'{name}.lua'))}end\n"
    algorithms = [name for name in names if name.startswith("algorithms/")]
    entries = ", ".join(f"{name.rpartition('/')[2]} = require('{name}')" for name in algorithms)
    yield f"files['algorithms/*'] = function() return {{{entries}}} end\n"


def _flags(script: str) -> str:
    """Return the flags of a script's header: without `allow-oom`, a store that is full does not run the function."""
    return ", ".join(f"'{flag}'" for flag in _FLAGS.findall(script))


def _named(text: str) -> Library:
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]
    name = f"{PREFIX}{_NO_NAME.sub('_', RELEASE)}_{digest}"
    source = f"#!lua name={name}\n{text.replace('%LIBRARY%', name)}"
    functions = re.findall(rf"^register\('({name}_(\w+))'", source, re.MULTILINE)
    return Library(name, source.encode(), MappingProxyType({script: function for function, script in functions}))
