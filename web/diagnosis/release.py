"""The release that runs."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def release() -> str:
    try:
        return version("leasehold")
    except PackageNotFoundError:  # it runs from files that were never installed
        return "source"
