"""Failures that no rule of the domain causes, in the coordinator's own words: callers need not know the driver."""


class DatabaseUnavailable(RuntimeError):
    """Postgres cannot be asked now. What was being done may be repeated: every operation is safe to repeat."""


class ClockNotTrusted(DatabaseUnavailable):
    """This coordinator's clock differs from the database's, so it decides nothing that depends on the time."""


class TransactionFailed(DatabaseUnavailable):
    """Postgres is there, and this transaction could not be done: it waited too long for a lock, conflicted with others,
    ran too long or needed too much memory. Other transactions are not concerned.
    """


class DecisionOutdated(RuntimeError):
    """What a transaction had read before it held its locks has changed since. It has to begin again from its start."""
