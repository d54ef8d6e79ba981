"""The movements of units, as rows of `transfer`."""

import functools
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from datetime import datetime

import msgspec

from coordinator.database.connection import Connection
from coordinator.exchange.rules.posting import Entry, Movement
from protocol.identifiers import KEYS_REMEMBERED
from protocol.periods import moment_of

MINUTES_REMEMBERED = 10_000  # as text: usage of the same few is reported again and again


def rows_of_transfers(entries: Iterable[Entry]) -> Iterator[dict[str, object]]:
    """Return transfers by column name, without the moment of booking. A column that is left out is null."""
    for entry in entries:
        is_movement = isinstance(entry, Movement)
        origin: dict[str, object] = {} if entry.region is None else {"region": entry.region, "epoch": entry.epoch}
        if isinstance(entry, Movement):
            origin["movement_id"] = entry.movement_id
        else:
            origin |= {"lane": entry.lane, "seq": entry.seq}
        for each in entry.transfers:
            row = {
                **origin,
                "period": each.key.period,
                "quota": each.key.quota,
                "src": each.src,
                "dst": each.dst,
                "units": each.units,
                "cause": each.cause,
                "part": each.part,
                "charge_period": each.charge_period,
            }
            if not is_movement:
                row["line"] = each.line
            if each.minute is not None:
                row["window_at"] = _moment(each.minute)
            if each.dimensions is not None:
                row["dimensions"] = each.dimensions
            yield row


async def copy_transfers(connection: Connection, entries: Iterable[Entry], now: datetime) -> None:
    """Write transfers by COPY: no other way takes rows in so cheaply, and every trigger, key and check applies as well.

    Rows are text, since the driver would look at each value of each row. They are sent entry by entry, so that Postgres
    takes in one while the next is written.
    """
    moving = [entry for entry in entries if entry.transfers]
    if moving:
        texts = _texts(moving, now.isoformat())
        await connection.copy_to_table("transfer", source=texts, columns=TRANSFER_COLUMNS)


async def _texts(entries: Iterable[Entry], recorded_at: str) -> AsyncIterator[bytes]:
    for entry in entries:
        yield "".join(_rows(entry, recorded_at)).encode()


def _rows(entry: Entry, recorded_at: str) -> Iterator[str]:
    """Return the columns as COPY reads them: with tabs between, in the order of TRANSFER_COLUMNS."""
    whose = (_NULL, _NULL) if entry.region is None else (_text(entry.region), str(entry.epoch))
    origin = "\t".join((*whose, *_origin(entry)))
    for each in entry.transfers:
        period, quota, charged = _text(each.key.period), _text(each.key.quota), _text(each.charge_period)
        line = _NULL if isinstance(entry, Movement) else each.line
        dimensions = _NULL if each.dimensions is None else _json(each.dimensions)
        minute = _NULL if each.minute is None else _moment(each.minute)
        yield (
            f"{period}\t{quota}\t{each.src}\t{each.dst}\t{each.units}\t{each.cause}\t{origin}\t{line}\t{each.part}\t"
            f"{minute}\t{dimensions}\t{charged}\t{recorded_at}\n"
        )


TRANSFER_COLUMNS = (
    *("period", "quota", "src", "dst", "units", "cause"),
    *("region", "epoch", "movement_id", "lane", "seq"),  # the origin
    *("line", "part", "window_at", "dimensions", "charge_period", "recorded_at"),
)
_NULL = "\\N"
_ESCAPED = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def _origin(entry: Entry) -> tuple[str, str, str]:
    """A movement has an id of its own; a report has its lane and its number."""
    if isinstance(entry, Movement):
        return str(entry.movement_id), _NULL, _NULL
    return _NULL, str(entry.lane), str(entry.seq)


@functools.lru_cache(maxsize=KEYS_REMEMBERED)
def _text(text: str) -> str:
    return text.translate(_ESCAPED)


def _json(dimensions: Mapping[str, str]) -> str:
    """JSON contains no tabs and no line ends of its own."""
    return msgspec.json.encode(dimensions).decode().replace("\\", "\\\\")


@functools.lru_cache(maxsize=MINUTES_REMEMBERED)
def _moment(minute: int) -> str:
    return moment_of(minute).isoformat()
