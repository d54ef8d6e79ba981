"""Failures of the database and the clock, so that callers need not know the driver."""


class DatabaseUnavailable(RuntimeError):
    """Postgres cannot be reached now. Every operation is safe to repeat."""


class ClockNotTrusted(DatabaseUnavailable):
    """This coordinator's clock differs from the database's, so it decides nothing that depends on the time."""


class LimitsNotReadable(DatabaseUnavailable):
    """A newer release applied the limits document, and this one cannot read it."""


class TransactionFailed(DatabaseUnavailable):
    """Postgres is available, but this transaction failed.

    It waited too long for a lock, conflicted with others, ran too long or needed too much memory. Other
    transactions are not affected.
    """


class DecisionOutdated(RuntimeError):
    """The rows that a transaction read before it held its locks have changed since. It has to start again."""
