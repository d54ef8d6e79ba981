"""Write logs as one JSON object a line on stdout, without secrets.
What libraries log through `logging` is written the same way. Secrets are blanked last, by the names of keys and by
their form, also inside tracebacks: an error message may quote a connection URL.
"""

import functools
import json
import logging
import re
import sys
from typing import Any, BinaryIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_BLANK = "***"
_SECRET_NAME = re.compile(r"token|authorization|password|passwd|secret|cookie|api[_-]?key|credential|private_key", re.I)
_SECRET_LOOKS = (
    (re.compile(r"://[^\s\"'<>]*@"), f"://{_BLANK}@"),
    (re.compile(r"\blh_[A-Za-z0-9_-]{8,}"), f"lh_{_BLANK}"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]*\.[\w-]*"), f"eyJ{_BLANK}"),  # a JWT
    (re.compile(r"\bwhsec_[A-Za-z0-9+/=_-]{8,}"), f"whsec_{_BLANK}"),
    # Postgres quotes the whole row that broke a constraint.
    (re.compile(r"Failing row contains \(.*\)"), f"Failing row contains ({_BLANK})"),
    (re.compile(r"\b(bearer|basic)\s+[^\s\"',;]+", re.I), rf"\1 {_BLANK}"),
    (
        re.compile(r"((?:token|password|passwd|secret|api[_-]?key)\"?'?\s?[=:]\s?[\"']?)[^\s&\"',;]+", re.I),
        rf"\1{_BLANK}",
    ),
)
# Checked before all other patterns: most text has no secret, and every request writes a line.
_SUSPECT = re.compile(r"://|lh_|eyJ|whsec_|failing row|bearer|basic|token|passw|secret|api[_-]?key", re.I)
# Declared in the code, or validated before. They are in every access line, where searching them would cost most.
_HARMLESS = frozenset(("request_id", "method", "route", "status", "duration_ms"))
# Libraries whose INFO is too much: uvicorn logs its own life cycle, httpx logs every URL.
_QUIET_LIBRARIES = ("uvicorn", "uvicorn.error", "httpx", "httpcore", "asyncio")


def configure_logging(service: str, level: str) -> None:
    """Configure the logs of a process. Call it once, at the start."""
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=_processors(service),
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: _Lines(sys.stdout.buffer),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(handlers=[_ThroughStructlog()], level=number, force=True)
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))


def _processors(service: str) -> list[Processor]:
    def named(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.format_exc_info,
        blank_secrets,  # after all processors that add text of others
        named,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _as_line,
    ]


def blank_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A structlog processor that removes secrets from an event."""
    return {name: value if name in _HARMLESS else _blanked(name, value) for name, value in event.items()}


def _blanked(name: str, value: object) -> object:
    if _is_secret_name(name):
        return _BLANK
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, dict):
        return {str(key): _blanked(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_blanked("", inner) for inner in value]
    return without_secrets(value if isinstance(value, str) else repr(value))


@functools.lru_cache(maxsize=1024)
def _is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def without_secrets(text: str) -> str:
    """Return a text without anything that looks like a secret."""
    if not _SUSPECT.search(text):
        return text
    for look, blank in _SECRET_LOOKS:
        text = look.sub(blank, text)
    return text


def _as_line(_logger: WrappedLogger, _method: str, event: EventDict) -> bytes:
    try:
        return msgspec.json.encode(event)
    except (UnicodeEncodeError, OverflowError, msgspec.MsgspecError):
        return json.dumps(event, default=repr).encode("ascii")


class _Lines:
    """Writes lines to a file. A log whose reader is gone must not fail the service."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def msg(self, line: bytes) -> None:
        try:
            self._file.write(line + b"\n")
            self._file.flush()
        except (OSError, ValueError):
            return

    log = debug = info = warning = warn = error = critical = fatal = exception = failure = err = msg


class _ThroughStructlog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            message: Any = record.getMessage().strip()
            structlog.get_logger().log(record.levelno, message, logger=record.name, exc_info=record.exc_info)
        except Exception:  # as logging does itself: a bad format string of a library must not raise
            self.handleError(record)
