"""The token that the client sends: a text, or one that may change, in a file or from a function."""

import os
from collections.abc import Callable
from time import monotonic

from leasehold.client.agent_protocol import AgentUnavailable

Token = str | os.PathLike[str] | Callable[[], str]
READ_EVERY_S = 1.0


def token_source(token: Token | None) -> Callable[[], str | None]:
    """Return a function that returns the token to send now. Raise OSError or ValueError for a file without one."""
    if token is None or isinstance(token, str):
        return lambda: token
    if callable(token):
        return lambda: _call(token)
    return TokenFile(token).read


def _call(function: Callable[[], str]) -> str:
    """Return a function's token. Whatever it raises, `on_failure` has to answer then."""
    try:
        return _checked(function())
    except Exception as error:
        raise AgentUnavailable(f"there is no token: {error or type(error).__name__}") from error


class TokenFile:
    """A token in a file, which is read again at most once a second. If it cannot be read, the last one is sent."""

    def __init__(self, path: os.PathLike[str]) -> None:
        self._path = path
        self._token = self._content()
        self._read_at_s = monotonic()

    def read(self) -> str:
        now_s = monotonic()
        if now_s - self._read_at_s >= READ_EVERY_S:
            self._read_at_s = now_s
            try:
                self._token = self._content()
            except (OSError, ValueError):
                return self._token
        return self._token

    def _content(self) -> str:
        with open(self._path, encoding="utf-8") as file:
            return _checked(file.read().strip())


def _checked(token: str) -> str:
    """Return a token that can be in a header."""
    if not (token.isascii() and token.isprintable() and token):
        raise ValueError("the token is empty, or has characters that a header cannot have")
    return token
