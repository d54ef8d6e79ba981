"""The preconditions of writes: each statement says how many rows it must find."""

from collections.abc import Iterable


class UnexpectedRows(RuntimeError):
    """A row was not as it must be under the transaction's locks. This is a bug: the transaction writes nothing."""


def expect_rows(counts: Iterable[int] | None, expected: tuple[int, ...], what: str) -> None:
    """Raise UnexpectedRows unless a statement changed as many rows as it had to."""
    if counts is None or tuple(counts) != expected:
        raise UnexpectedRows(f"{what}: {counts} of {expected} rows were as expected")
