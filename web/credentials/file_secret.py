"""A secret of the settings that is in a file, and may change while the service runs."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic

import structlog
from pydantic import SecretStr

from web.credentials.secret_files import read_secret_file

READ_EVERY_S = 1.0

_log = structlog.get_logger(__name__)


class FileSecret(SecretStr):
    """A secret that is read again from its file when it is used, at most once a second.

    While the file cannot be read, or `check` refuses its content with a ValueError, the last secret stays in use.
    """

    def __init__(
        self,
        variable: str,
        path: Path,
        value: str,
        check: Callable[[str], None],
        now_s: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__(value)
        self._variable = variable
        self._path = path
        self._check = check
        self._now_s = now_s
        self._refused = ""  # the reason that was logged last
        self._read_again_at_s = now_s() + READ_EVERY_S

    def get_secret_value(self) -> str:
        now_s = self._now_s()
        if now_s >= self._read_again_at_s:
            self._read_again_at_s = now_s + READ_EVERY_S
            self._read_again()
        return self._secret_value

    def _read_again(self) -> None:
        try:
            value = read_secret_file(self._variable, self._path)
            if value != self._secret_value:
                self._check(value)
        except ValueError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                _log.warning("a secret's file cannot be used, its last content stays in use", reason=self._refused)
            return
        self._refused = ""
        if value != self._secret_value:
            self._secret_value = value
            _log.info("a secret was read again", variable=self._variable)
