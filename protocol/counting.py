"""So many of something, as people say it."""


def counted(count: int, what: str) -> str:
    """`1 fault`, `2 faults`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
