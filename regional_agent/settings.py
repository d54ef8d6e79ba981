"""What an agent is told by its environment. Read once, by `main`, and by nobody else."""

import os
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from protocol.identifiers import REGION_PATTERN
from regional_agent.store.connection import StoreAddress
from regional_agent.store.topology import SCHEME, ClusterAddress
from web.connections import MAX_CONNECTIONS
from web.settings import Settings

LogLevel = Literal["debug", "info", "warning", "error"]


def _own_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


class AgentSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="LEASEHOLD_AGENT_")

    region: str = Field(pattern=REGION_PATTERN, examples=["us-east"])
    coordinator_url: str = Field(pattern=r"^https?://[^/]+$", examples=["http://127.0.0.1:8400"])
    coordinator_token: SecretStr = Field(min_length=1, examples=["lh_…"])
    store_url: SecretStr = Field(examples=["redis://:secret@127.0.0.1:6379/0"])
    host: str = Field(default="127.0.0.1", min_length=1, examples=["127.0.0.1"])
    port: int = Field(default=8411, ge=0, le=65535, examples=[8411])
    uds: str | None = Field(default=None, examples=["/run/leasehold/agent.sock"])
    service_token: SecretStr | None = Field(default=None, min_length=16, examples=["a long random text"])
    adjust_token: SecretStr | None = Field(default=None, min_length=16, examples=["another long random text"])
    adjust_ceiling: int = Field(default=100, ge=1, le=1_000_000, examples=[100])
    name: str = Field(default_factory=_own_name, min_length=1, max_length=128, examples=["agent-1"])
    workers: int = Field(default=1, ge=1, le=64, examples=[4])
    report_interval_ms: int = Field(default=500, ge=10, le=60_000, examples=[500])
    store_timeout_ms: int = Field(default=250, ge=1, le=60_000, examples=[250])
    decision_timeout_ms: int = Field(default=5, ge=1, le=60_000, examples=[5])
    decision_timeout_max_ms: int = Field(default=50, ge=1, le=60_000, examples=[50])
    breaker_failures: int = Field(default=5, ge=1, le=1000, examples=[5])
    breaker_pause_ms: int = Field(default=1000, ge=1, le=60_000, examples=[1000])
    lame_duck_ms: int = Field(default=5_000, ge=0, le=600_000, examples=[5_000])
    return_on_stop: bool = Field(default=False, examples=["false"])
    state_dir: Path | None = Field(default=None, examples=["/var/lib/leasehold"])
    journal_dir: Path | None = Field(default=None, examples=["/var/lib/leasehold/journal"])
    journal_max_bytes: int = Field(default=16 * 1024 * 1024, ge=4096, examples=[16_777_216])
    journal_max_ms: int = Field(default=15 * 60_000, ge=1000, examples=[900_000])
    max_body_bytes: int = Field(default=1024 * 1024, ge=1024, examples=[1_048_576])
    max_header_bytes: int = Field(default=16 * 1024, ge=1024, examples=[16_384])
    max_connections: int = Field(default=MAX_CONNECTIONS, ge=1, le=1_000_000, examples=[MAX_CONNECTIONS])
    request_timeout_ms: int = Field(default=10_000, ge=10, le=3_600_000, examples=[10_000])  # for it to arrive
    log_level: Annotated[LogLevel, Field(examples=["info"])] = "info"

    @field_validator("store_url")
    @classmethod
    def _is_a_store(cls, value: SecretStr) -> SecretStr:
        url = value.get_secret_value()
        try:
            ClusterAddress(url) if url.startswith(SCHEME) else StoreAddress(url)
        except ValueError:
            # The message would repeat the value, and with it the password.
            raise ValueError(
                "it must look like redis://:password@host:port/0, unix:///path or"
                " redis+cluster://:password@host:port,host:port"
            ) from None
        return value

    @model_validator(mode="after")
    def _asks_for_a_token_elsewhere(self) -> Self:
        if self.service_token is None and self.uds is None and not is_loopback(self.host):
            raise ValueError(
                "LEASEHOLD_AGENT_SERVICE_TOKEN is not set, and LEASEHOLD_AGENT_HOST is not loopback: an agent that"
                " others can reach asks them for a token. Example: LEASEHOLD_AGENT_SERVICE_TOKEN=<a long random text>"
            )
        return self


def journal_of(settings: AgentSettings) -> Path | None:
    """Where its journal is, if it has one: with its state, unless it is told otherwise."""
    own = settings.state_dir / "journal" if settings.state_dir is not None else None
    return settings.journal_dir or own


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
