"""Run Redis scripts in this process: Lua 5.1, as Redis has it, and of Redis's own API as much as lua/ uses.

`Interpreter.run` follows Redis where a script could see the difference: numbers become text on their way into a
command, a missing value is false, an error is a table with `err`, a reply's numbers are cut to integers and end at the
first nil, and a script can neither create a global nor touch a key that is not among its KEYS (in a Cluster it might
lie in another slot). tests/lua/test_scripted_store.py compares all of it with a real store.

Text is latin-1 in here: one character for each byte, whatever the bytes mean.
"""

import json
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from lupa import lua51  # type: ignore[import-untyped]  # it has no types

from regional_agent.store.connection import StoreError

Reply = Any
Call = Callable[..., Reply]
MAX_IN_DIGITS = 10**17
MOST_UNPACKED = 4_000  # values that one Python function may give to Lua at once; more of them become a table first
LISTS = ("HGETALL", "HMGET", "HSCAN", "LRANGE", "TIME", "ZRANGE", "ZRANGEBYSCORE")  # commands whose reply is an array

# Everything that crosses between Lua and Python costs, so arrays come as several values and are made tables in Lua.
_API = """
local call, pack, unpack_, encode, is_list = ...
redis = {call = function(name, ...)
  if is_list[name] then
    local reply = {call(name, ...)}
    if reply[1] == nil and reply[2] then error({err = reply[2]}, 0) end
    if type(reply[1]) == 'table' then return reply[1] end
    return reply
  end
  local reply, fault = call(name, ...)
  if fault then error({err = fault}, 0) end
  return reply
end}
struct = {pack = pack, unpack = unpack_}
cjson = {encode = encode}
KEYS, ARGV = {}, {}
os, io, require, module, package, debug, python, dofile, loadfile = nil

local environment = {}
for name, value in pairs(_G) do environment[name] = value end
setmetatable(environment, {
  __index = function(_, name)
    error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
  end,
  __newindex = function(_, name) error('Attempt to modify a readonly table: ' .. tostring(name), 2) end,
})

local function compile(source)
  local script, fault = loadstring(source, '@user_script')
  if not script then error(fault, 0) end
  return setfenv(script, environment)
end

local function result_of(is_done, reply)
  if is_done then return true, reply end
  return false, type(reply) == 'table' and reply.err or tostring(reply)
end

local function run(script, keys, argv)
  environment.KEYS, environment.ARGV = keys, argv
  return result_of(pcall(script))
end

local function call_function(callback, keys, argv)
  return result_of(pcall(callback, keys, argv))
end

local function load_library(source)
  local functions = {}
  redis.register_function = function(named) functions[named.function_name] = named.callback end
  compile(source)()
  redis.register_function = nil
  return functions
end

return compile, run, load_library, call_function
"""


class Status(str):
    """A reply that says how it went, `+OK`; a script sees a table with `ok`."""


class ShimError(Exception):
    """A script asked for something that this stand-in for Redis does not have, or must not give."""


class Interpreter:
    """One Lua state. It keeps every script compiled, and runs each against the commands of whoever calls it."""

    def __init__(self) -> None:
        self._lua = lua51.LuaRuntime(encoding="latin-1", unpack_returned_tuples=True, register_eval=False)
        is_list = self._lua.table_from(dict.fromkeys(LISTS, True))
        install = self._lua.eval(f"function(...)\n{_API}\nend")
        self._compile, self._run, self._load, self._call_function = install(
            self._call, _pack, _unpack, _encode, is_list
        )
        self._scripts: dict[str, Any] = {}
        self._libraries: dict[bytes, Any] = {}
        self._command: Call = _no_command
        self._keys: frozenset[str] = frozenset()
        self._error: Exception | None = None

    def run(self, source: str, command: Call, keys: Sequence[str], argv: Sequence[str]) -> Reply:
        """Run a script; `command` carries out what it asks of the store."""
        script = self._scripts.get(source)
        if script is None:
            script = self._scripts[source] = self._compile(source)
        return self._run_script(self._run, script, command, keys, argv)

    def call(self, library: bytes, function: str, command: Call, keys: Sequence[str], argv: Sequence[str]) -> Reply:
        """Call a function of a library, which is loaded the first time."""
        functions = self._libraries.get(library)
        if functions is None:
            source = library.decode("latin-1").partition("\n")[2]  # the first line names the engine and the library
            functions = self._libraries[library] = self._load(source)
        return self._run_script(self._call_function, functions[function], command, keys, argv)

    def _run_script(self, run: Any, script: Any, command: Call, keys: Sequence[str], argv: Sequence[str]) -> Reply:
        self._command, self._keys, self._error = command, frozenset(keys), None
        is_done, reply = run(script, self._lua.table_from(keys), self._lua.table_from(argv))
        if self._error is not None:  # not even a script that catches errors may hide this one
            raise self._error
        if not is_done:
            raise StoreError(reply)
        return _from_lua(reply)

    def evaluate(self, source: str, *arguments: Any) -> Any:
        """Give what a chunk of Lua returns, as it is."""
        return self._compile(source)(*arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Carry out a command for a script. (None, text) is an error, which the Lua above raises."""
        texts = [each if type(each) is str else text_of_number(each) for each in arguments]
        try:
            if texts and texts[0] not in self._keys:
                raise ShimError(f"{name} of {texts[0]}, which is not among the script's KEYS")
            return self._into_lua(self._command(name, *texts))
        except StoreError as error:
            return None, str(error)
        except Exception as error:
            self._error = error
            return None, f"ERR {error}"

    def _into_lua(self, reply: Reply) -> Any:
        if type(reply) is list:
            values = tuple([self._value_into_lua(each) for each in reply])
            return values if len(values) <= MOST_UNPACKED else self._lua.table_from(values)
        if type(reply) is Status:
            return self._lua.table_from({"ok": str(reply)})
        return False if reply is None else reply

    def _value_into_lua(self, value: Any) -> Any:
        if value is None:
            return False
        return self._lua.table_from(value) if type(value) is list else value


def _no_command(name: str, *_: str) -> Reply:
    raise ShimError(f"{name}, outside of a script")


def text_of_number(number: float) -> str:
    """Write a number as Redis does: an integer in digits, else the shortest text that reads as the same double."""
    if float(number).is_integer() and abs(number) < MAX_IN_DIGITS:
        return str(int(number))
    mantissa, _, exponent = repr(number).partition("e")
    return f"{mantissa}e{int(exponent):+}" if exponent else mantissa


def _from_lua(value: Any) -> Reply:
    """Convert what a script returns as Redis does."""
    if isinstance(value, str):
        return value.encode("latin-1")
    if value is None or isinstance(value, bool):
        return 1 if value else None
    if isinstance(value, int | float):
        return int(value)
    if (status := value["ok"]) is not None:
        return str(status).encode("latin-1")
    if (fault := value["err"]) is not None:
        raise StoreError(fault)
    reply, at = [], 1
    while (each := value[at]) is not None:
        reply.append(_from_lua(each))
        at += 1
    return reply


# --- the libraries ----------------------------------------------------------------------------------------------------

_CODES = {"B": "B", "i8": "q", "I2": "H", "d": "d"}


@cache
def _layout(layout: str) -> tuple[struct.Struct, tuple[bool, ...]]:
    """Return the layout for Python's struct, and which of its values are integers."""
    codes, at = [], 1
    while at < len(layout):
        size = 2 if layout[at : at + 2] in _CODES else 1
        codes.append(_CODES[layout[at : at + size]])
        at += size
    return struct.Struct("<" + "".join(codes)), tuple(code != "d" for code in codes)


def _pack(layout: str, *values: float) -> str:
    packer, integers = _layout(layout)
    whole = [int(value) if is_integer else value for value, is_integer in zip(values, integers, strict=True)]
    return packer.pack(*whole).decode("latin-1")


def _unpack(layout: str, packed: str, at: int = 1) -> tuple[float, ...]:
    """Give the values, and the place after them."""
    packer, _ = _layout(layout)
    return *packer.unpack_from(packed.encode("latin-1"), at - 1), at + packer.size


def _encode(text: str) -> str:
    """Encode a string as cjson does; the scripts encode nothing else."""
    if not isinstance(text, str):
        raise ShimError(f"cjson.encode of {text!r}")
    return json.dumps(text, ensure_ascii=False).replace("/", "\\/").replace("\x7f", "\\u007f")


@cache
def interpreter() -> Interpreter:
    """Give this process's interpreter: making one, and compiling all scripts, costs as much as a short run."""
    return Interpreter()
