"""What fails outside of the coordinator, in its own words: the doors answer it without knowing the driver."""


class DatabaseUnavailable(RuntimeError):
    """Postgres cannot be asked now. What was being done may be repeated: every operation is safe to repeat."""
