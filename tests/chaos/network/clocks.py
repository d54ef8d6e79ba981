"""A clock of one process that a test sets, by libfaketime. Other processes keep the machine's."""

from pathlib import Path

from tests.parts import part


class MovableClock:
    def __init__(self, directory: Path) -> None:
        self._offset = directory / "offset-of-the-clock"
        self._script = directory / "with-a-movable-clock"
        [self._library] = (part("faketime") / "usr" / "lib").glob("*/faketime/libfaketimeMT.so.1")
        self.move(0)

    def move(self, hours: int) -> None:
        """Let the process see a time so many hours after the machine's, within a second. Time since its start stays."""
        self._offset.write_text(f"{hours * 3600:+d}\n", encoding="utf-8")

    def program(self, binary: Path) -> Path:
        """Return a script that runs a program with this clock."""
        environ = {
            "LD_PRELOAD": self._library,
            "FAKETIME_TIMESTAMP_FILE": self._offset,
            "FAKETIME_CACHE_DURATION": 1,  # seconds after which the file is read again
            "FAKETIME_DONT_FAKE_MONOTONIC": 1,
        }
        settings = " ".join(f"{name}='{value}'" for name, value in environ.items())
        self._script.write_text(f'#!/bin/sh\nexec env {settings} "{binary}" "$@"\n', encoding="utf-8")
        self._script.chmod(0o700)
        return self._script
