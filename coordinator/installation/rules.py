"""Distinguish an installation from a copy of its database.

A database remembers where it was confirmed: in which Postgres cluster, as which database, and under which addresses its
coordinators reach it. A dump that was restored has another cluster or another database. A copy of the files has the
same, as a standby that took over has; it has another address, unless it stands in another network under the same name.
For that a coordinator can be given the name of its installation, which is compared in place of addresses.
"""

from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

DEFAULT_PORT = "5432"


class Home(NamedTuple):
    """The place where a coordinator finds its database."""

    system_identifier: str  # empty if it cannot be read
    database_oid: int
    addresses: frozenset[str]


def addresses_of(database_url: str, name: str) -> frozenset[str]:
    """Return the addresses of a database URL, or the name that the settings give this installation."""
    if name:
        return frozenset({f"name:{name}"})
    parts = urlsplit(database_url)
    query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    hosts = query.get("host") or unquote(parts.netloc.rpartition("@")[2])
    ports = query.get("port", DEFAULT_PORT).split(",")
    database = parts.path.strip("/")
    addresses = hosts.split(",")
    return frozenset(
        f"{_with_port(host, ports[min(number, len(ports) - 1)])}/{database}" for number, host in enumerate(addresses)
    )


def _with_port(host: str, port: str) -> str:
    has_port = host.rpartition(":")[2].isdecimal() and not host.endswith("]") and not host.startswith("/")
    return host.lower() if has_port else f"{host.lower()}:{port}"


def why_unconfirmed(confirmed: Home, here: Home) -> str | None:
    """Return how this place differs from where the installation was confirmed, or None if it does not."""
    if confirmed.database_oid != here.database_oid or (
        here.system_identifier and confirmed.system_identifier and confirmed.system_identifier != here.system_identifier
    ):
        return "the database is another one than the one that was confirmed: it was restored or copied"
    if not confirmed.addresses & here.addresses:
        return f"the database is reached at {', '.join(sorted(here.addresses))}, which is not confirmed"
    return None
