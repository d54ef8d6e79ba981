"""Counts with their nouns."""


def counted(count: int, what: str) -> str:
    """Return a count with its noun: `1 fault`, `2 faults`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
