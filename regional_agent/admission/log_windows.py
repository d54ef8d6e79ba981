"""Bounds how often lines of one reason are logged."""

LINES = 5  # for each reason
WINDOW_MS = 10_000


class LogWindows:
    """Lets the first lines of each reason through in each window of time, and counts the rest."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def note(self, reason: str, now_ms: int) -> int | None:
        """Return how many lines of the window before were suppressed; None if this line is to be suppressed."""
        window = self._windows.get(reason)
        if window is None or now_ms >= window.began_ms + WINDOW_MS:
            suppressed = 0 if window is None else max(0, window.noted - LINES)
            window = self._windows[reason] = _Window(now_ms, suppressed)
        window.noted += 1
        return window.suppressed_before if window.noted <= LINES else None


class _Window:
    __slots__ = ("began_ms", "noted", "suppressed_before")

    def __init__(self, began_ms: int, suppressed_before: int) -> None:
        self.began_ms = began_ms
        self.noted = 0
        self.suppressed_before = suppressed_before  # in the window before
