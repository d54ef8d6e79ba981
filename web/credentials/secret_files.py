"""Secrets in files: the variable `X_FILE` names a file that has the secret of the variable `X`.

A file may be readable by other users of its machine. Secrets that Kubernetes and Compose mount are, and what keeps them
is that only its container has the mount.
"""

from collections.abc import Mapping
from pathlib import Path

SUFFIX = "_FILE"
MAX_BYTES = 65_536


class SecretFileError(ValueError):
    """Says in one sentence which variable has no usable secret, and why. It never has the secret."""


def read_secret(environ: Mapping[str, str], variable: str) -> str | None:
    """Return the secret of a variable, or of the file that its `_FILE` names; None if neither is set."""
    value, file = environ.get(variable), environ.get(variable + SUFFIX)
    if value and file:
        raise SecretFileError(f"{variable} and {variable}{SUFFIX} are both set; leave one of them out")
    return read_secret_file(variable, Path(file)) if file else value or None


def read_secret_file(variable: str, path: Path) -> str:
    """Return the content of a file without the end of its last line."""
    name = f"{variable}{SUFFIX} names {str(path)!r}, which"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SecretFileError(f"{name} cannot be read: {error.strerror or type(error).__name__}") from None
    if len(content) > MAX_BYTES:
        raise SecretFileError(f"{name} is larger than {MAX_BYTES} bytes")
    try:
        secret = content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise SecretFileError(f"{name} is not UTF-8") from None
    if not secret:
        raise SecretFileError(f"{name} is empty")
    return secret
