"""Read secrets for commands from the environment, because other users of the machine can see arguments."""

import os

from leasehold.cli.output import fail


def secret_of(variable: str) -> str | None:
    """Return the secret of a variable, or of the file that its `_FILE` names; end the command if it cannot be read."""
    from web.credentials.secret_files import SecretFileError, read_secret

    try:
        return read_secret(os.environ, variable)
    except SecretFileError as error:
        fail(str(error))
