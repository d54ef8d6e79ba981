"""The library of functions in one store, or in one cell of a Cluster: loading it, and removing unused versions.

A store may lose its functions at any time: it is new, restarted without persistence, was promoted before the library
had reached it, or was flushed. A call of a function that the store does not have changes nothing. So an agent that
gets that answer loads the library and sends the call again; no other moment has to be watched for.

Several versions may be in use at once, for each agent calls its own. Each agent notes once a minute which library it
uses. A library of ours that none has noted for an hour is deleted. That is housekeeping only: an agent that still
calls it would load it again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import structlog

from regional_agent.store.connection import Argument, OnReply, Reply, Store, StoreError, StoreUnavailable
from regional_agent.store.sources import PREFIX, Library

log = structlog.get_logger()

BEGINS_AN_EPOCH = frozenset({"begin_incarnation", "adopt_epoch", "rebind_epoch"})  # their writes are confirmed later
MAX_LOADS = 2  # for one call: the functions may be flushed again meanwhile
NOTE_INTERVAL_S = 60.0
UNCONNECTED_PAUSE_S = 1.0
UNUSED_S = 3_600  # a library without a note for so long is deleted
NOTES_TTL_MS = 7 * 86_400_000
PERMISSIONS = "+fcall +function|load +function|list +function|delete"

_UNKNOWN_FUNCTION = "ERR Function not found"
_ALREADY_LOADED = "already exists"
_REFUSALS = ("NOPERM", "ERR unknown command", "ERR Unknown subcommand", "ERR unknown subcommand")


class LibraryRefused(StoreUnavailable):
    """The store does not load or call functions, so it cannot decide anything."""


def is_unknown_function(reply: Reply | Exception) -> bool:
    """Return whether the store has no such function: then nothing has run."""
    return isinstance(reply, StoreError) and str(reply).startswith(_UNKNOWN_FUNCTION)


class StoreLibrary:
    def __init__(self, store: Store, library: Library, notes_key: bytes) -> None:
        self.library = library
        self.loads = 0
        self.refusal = ""  # why the store did not load or call the functions, until it does
        self.idle_s: dict[str, int] = {}  # of each library of ours in the store: since when no agent has noted it
        self._store = store
        self._notes_key = notes_key
        self._load_call: tuple[Argument, ...] = ("FUNCTION", "LOAD", library.source)
        self._is_loading = False
        self._is_failing = False

    async def call(self, script: str, names: Sequence[bytes], *arguments: Argument) -> Reply:
        """Run a script. Raises StoreUnavailable or StoreError."""
        call = self._store.call_unconfirmed if script in BEGINS_AN_EPOCH else self._store.call
        try:
            reply = await self._call_or_load(
                call, ("FCALL", self.library.functions[script], len(names), *names, *arguments)
            )
        except StoreError as error:
            if not str(error).startswith(_REFUSALS) and not is_unknown_function(error):
                raise
            self._note_refusal(error)
            raise LibraryRefused(self.refusal) from None
        self.refusal = ""
        return reply

    async def _call_or_load(self, call: Callable[..., Awaitable[Reply]], arguments: Sequence[Argument]) -> Reply:
        try:
            return await call(*arguments)
        except StoreError as error:
            if not is_unknown_function(error):
                raise
        await self._load()
        return await call(*arguments)

    def repeats(
        self, call: Sequence[Argument], error: StoreError, on_reply: OnReply, loads_left: int = MAX_LOADS
    ) -> bool:
        """Load the library and send a call again if it has not run: return whether `on_reply` gets its reply."""

        def on_next_reply(reply: Reply | Exception) -> None:
            if not isinstance(reply, StoreError) or not self.repeats(call, reply, on_reply, loads_left - 1):
                on_reply(reply)

        if not is_unknown_function(error):
            return False
        if loads_left:
            self._send_load()
            self._store.send(call, on_next_reply)
        else:
            on_reply(LibraryRefused(self.refusal or f"the store does not keep {self.library.name}"))
        return True

    # --- loading ------------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        try:
            reply = await self._store.call(*self._load_call)
        except StoreError as error:
            self._on_loaded(error)
            if _ALREADY_LOADED not in str(error):
                raise
        else:
            self._on_loaded(reply)

    def _send_load(self) -> None:
        """Send the library, unless it is on its way: a store executes what arrives on one connection in order."""

        def on_loaded(reply: Reply | Exception) -> None:
            self._is_loading = False
            self._on_loaded(reply)

        if not self._is_loading:
            self._is_loading = True
            self._store.send(self._load_call, on_loaded)

    def _on_loaded(self, reply: Reply | Exception) -> None:
        if not isinstance(reply, Exception):
            self.loads += 1
            log.info("store function library loaded", library=self.library.name, store=self._store.node)
        elif isinstance(reply, StoreError) and _ALREADY_LOADED not in str(reply):
            self._note_refusal(reply)
            return
        self.refusal = ""

    def _note_refusal(self, error: StoreError) -> None:
        before = self.refusal
        remedy = f"Its user needs {PERMISSIONS}. " if str(error).startswith(_REFUSALS) else ""
        self.refusal = f"the store does not run {self.library.name}: {error}. {remedy}See docs/guides/stores.md"
        if self.refusal != before:
            log.error("store function library refused", library=self.library.name, reason=str(error))

    # --- housekeeping -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Note once a minute that the library is in use, and delete libraries that are not."""
        while True:
            if not self._store.connected:
                await asyncio.sleep(UNCONNECTED_PAUSE_S)
                continue
            try:
                await self.note_use()
                self._is_failing = False
            except (StoreUnavailable, StoreError) as error:
                if not self._is_failing:
                    log.warning("store function libraries are not cleaned up", reason=str(error))
                self._is_failing = True
            await asyncio.sleep(NOTE_INTERVAL_S)

    async def note_use(self) -> None:
        """Note that this agent uses its library, and delete each library of ours that no agent has used for long."""
        now_s = int((await self._store.call("TIME"))[0])
        found = await self._store.call("FUNCTION", "LIST", "LIBRARYNAME", f"{PREFIX}*")
        loaded = {_field(each, b"library_name").decode() for each in found}
        if self.library.name not in loaded:
            await self._load()
        pairs = await self._store.call("HGETALL", self._notes_key)
        noted = {pairs[i].decode(): int(pairs[i + 1]) for i in range(0, len(pairs), 2)}
        used = {name: noted.get(name, now_s) for name in loaded} | {self.library.name: now_s}
        unused = [name for name, at_s in used.items() if now_s - at_s > UNUSED_S]
        for name in unused:
            await self._delete(name)
        gone = [*unused, *(noted.keys() - used.keys())]
        if gone:
            await self._store.call("HDEL", self._notes_key, *gone)
        self.idle_s = {name: now_s - at_s for name, at_s in used.items() if name not in unused}
        # Of the others only what was never noted is written: another agent may have noted its own meanwhile.
        fresh = [name for name in used if name not in noted or name == self.library.name]
        await self._store.call("HSET", self._notes_key, *(part for name in fresh for part in (name, now_s)))
        await self._store.call("PEXPIRE", self._notes_key, NOTES_TTL_MS)

    async def _delete(self, name: str) -> None:
        try:
            await self._store.call("FUNCTION", "DELETE", name)
        except StoreError as error:
            if "not found" not in str(error):  # else another agent has deleted it
                raise
        log.info("unused store function library deleted", library=name, store=self._store.node)


def idle_libraries(libraries: Iterable[StoreLibrary]) -> dict[str, int]:
    """Return since when each library is idle in any of the cells: an agent uses the same one in all of them."""
    found: dict[str, int] = {}
    for each in libraries:
        for name, idle_s in each.idle_s.items():
            found[name] = min(idle_s, found.get(name, idle_s))
    return found


def _field(pairs: Sequence[bytes], name: bytes) -> bytes:
    return pairs[pairs.index(name) + 1]
