"""What to start and on which ports, decided from the options alone before anything is touched."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from leasehold.local_stack.embedded import LOOPBACK

REGIONS = ("us-east", "eu-west", "ap-south")
# One way, so a round trip takes twice as long.
DELAY_MS = {"us-east": 40, "eu-west": 70, "ap-south": 100}

DEFAULT_BASE_PORT = 8400
_AGENTS, _GRPC, _RELAY, _POSTGRES, _STORES = 11, 15, 21, 32, 79  # offsets from the base, which is the coordinator's
URL_VARIABLE = "LEASEHOLD_MIGRATE_DATABASE_URL"  # `leasehold migrate` reads it too
COORDINATOR_URL_VARIABLE = "LEASEHOLD_MIGRATE_COORDINATOR_URL"  # the URL that coordinators will use
HIGHEST_BASE_PORT = 65535 - _STORES - len(REGIONS)

# The agent has the complete rules of these addresses (regional_agent/store/address.py), and says what is wrong.
STORE_SCHEMES = (
    "redis",
    "rediss",
    "unix",
    *(f"redis{s}+{setup}" for s in ("", "s") for setup in ("sentinel", "cluster")),
)
Stack = Mapping[str, Any]  # what stack.json holds


@dataclass(frozen=True)
class StackPlan:
    data: Path
    base_port: int = DEFAULT_BASE_PORT
    wan: bool = False
    fresh: bool = False
    postgres: str | None = None  # the URL of an existing server, instead of an embedded one
    stores: Mapping[str, str] = field(default_factory=dict)  # URLs of existing stores, by region

    @property
    def coordinator_port(self) -> int:
        return self.base_port

    @property
    def postgres_port(self) -> int:
        return self.base_port + _POSTGRES

    def agent_port(self, region: str) -> int:
        return self.base_port + _AGENTS + REGIONS.index(region)

    def grpc_port(self, region: str) -> int:
        return self.base_port + _GRPC + REGIONS.index(region)

    def relay_port(self, region: str) -> int:
        return self.base_port + _RELAY + REGIONS.index(region)

    def store_port(self, region: str) -> int:
        return self.base_port + _STORES + REGIONS.index(region)

    @property
    def coordinator_url(self) -> str:
        return f"http://{LOOPBACK}:{self.coordinator_port}"

    def coordinator_url_for(self, region: str) -> str:
        """Return where an agent finds the coordinator: directly, or through its relay."""
        return f"http://{LOOPBACK}:{self.relay_port(region)}" if self.wan else self.coordinator_url

    def agent_url(self, region: str) -> str:
        return f"http://{LOOPBACK}:{self.agent_port(region)}"

    def embedded_stores(self) -> list[str]:
        return [region for region in REGIONS if region not in self.stores]

    def ports(self) -> Iterator[tuple[int, str]]:
        """Yield every port that must be free, and its purpose."""
        yield self.coordinator_port, "the coordinator"
        for region in REGIONS:
            yield self.agent_port(region), f"the agent of {region}"
            yield self.grpc_port(region), f"the gRPC door of {region}"
            if self.wan:
                yield self.relay_port(region), f"the relay of {region}"
            if region not in self.stores:
                yield self.store_port(region), f"the store of {region}"
        if self.postgres is None:
            yield self.postgres_port, "Postgres"


def faults_of_urls(postgres: str | None, stores: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the addresses of existing servers, without repeating them: they may hold a password."""
    if postgres is not None and not _is_url(postgres, ("postgresql", "postgres")):
        yield "--postgres: it must look like postgresql://user:password@host:port/database"
    for region, url in stores.items():
        if region not in REGIONS:
            yield f"--store: there is no region {region!r}; the regions are {', '.join(REGIONS)}"
        elif not _is_url(url, STORE_SCHEMES):
            yield f"--store {region}: it must look like redis://:password@host:port/0, with one of the schemes " + (
                ", ".join(STORE_SCHEMES)
            )


def _is_url(text: str, schemes: tuple[str, ...]) -> bool:
    try:
        url = urlsplit(text)
    except ValueError:
        return False
    return url.scheme in schemes and bool(url.hostname or url.path)
