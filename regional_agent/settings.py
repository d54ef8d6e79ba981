"""The settings of an agent. `main` reads them from the environment once, and passes them on."""

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import DirectoryPath, Field, FilePath, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from protocol.addresses import is_loopback
from protocol.identifiers import REGION_PATTERN
from regional_agent.store.address import StoreAddress
from regional_agent.store.opening import StoreAccess
from regional_agent.store.sources import library_in
from web.connections import MAX_CONNECTIONS
from web.credentials.jwt_settings import JwtSettings
from web.settings import READ_AT_START
from web.tls.context import TlsFiles
from web.tls.peers import IDENTITY_PATTERN
from web.tls.settings import (
    CertFile,
    ClientCaFile,
    KeyFile,
    RequireClientCert,
    check_client_files,
    check_server_files,
)
from web.tokens import is_bearer
from web.traces.settings import TraceSettings

LogLevel = Literal["debug", "info", "warning", "error"]
MIN_TOKEN_CHARS = 16
CHECK_SCOPE, ADJUST_SCOPE = SERVICE_SCOPES = ("service:check", "service:adjust")  # of JWTs


def _own_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


class AgentSettings(JwtSettings, TraceSettings):
    model_config = SettingsConfigDict(env_prefix="LEASEHOLD_AGENT_")

    region: str = Field(pattern=REGION_PATTERN, examples=["us-east"], description="Name of the region.")
    coordinator_url: str = Field(
        pattern=r"^https?://[^/,\s]+(,https?://[^/,\s]+)*$",
        examples=["https://coordinator-1:8400,https://coordinator-2:8400"],
        description=(
            "Address of the coordinator, or of several in order of preference, separated by commas. If one does not "
            "answer, the next one is used at once."
        ),
    )
    coordinator_token: SecretStr | None = Field(
        default=None,
        min_length=1,
        examples=["lh_…"],
        description=(
            "Token with the scope `region:NAME`. It is not needed if the client certificate has an identity of the "
            "region."
        ),
    )
    coordinator_ca_file: FilePath | None = Field(
        default=None,
        examples=["/etc/leasehold/ca.pem"],
        description=(
            "Authorities (PEM) that sign the coordinator's certificate, in place of those that the machine trusts."
        ),
    )
    coordinator_cert_file: FilePath | None = Field(
        default=None,
        examples=["/etc/leasehold/agent.pem"],
        description="Client certificate (PEM) for a coordinator that asks for one.",
    )
    coordinator_key_file: FilePath | None = Field(
        default=None,
        examples=["/etc/leasehold/agent.key"],
        description="Key (PEM) of the client certificate, if it is in a file of its own.",
    )
    store_url: SecretStr = Field(
        json_schema_extra=READ_AT_START,
        examples=["redis://:secret@127.0.0.1:6379/0"],
        description=(
            "Redis or Valkey with `maxmemory-policy noeviction`: `redis://user:password@host:port/0`, "
            "`unix:///path`, `redis+sentinel://user:password@host:port,host:port/service` or "
            "`redis+cluster://user:password@host:port,host:port`; with TLS `rediss://`, `rediss+sentinel://` or "
            "`rediss+cluster://`."
        ),
    )
    store_password: SecretStr | None = Field(
        default=None,
        min_length=1,
        examples=["a password"],
        description="Password of the store, in place of one in `STORE_URL`.",
    )
    store_ca_file: FilePath | None = Field(
        default=None,
        examples=["/etc/leasehold/store-ca.pem"],
        description="Certificates (PEM) that may sign the store's, beside those that the machine trusts.",
    )
    store_cert_file: FilePath | None = Field(
        default=None,
        examples=["/etc/leasehold/agent.pem"],
        description="Client certificate (PEM) for a store that asks for one.",
    )
    store_key_file: FilePath | None = Field(
        default=None,
        examples=["/etc/leasehold/agent.key"],
        description="Key (PEM) of the client certificate, if it is in a file of its own.",
    )
    store_check_hostname: bool = Field(
        default=True,
        examples=["true"],
        description=(
            "Set it to false if the store's certificate does not contain the name or address that the agent connects "
            "to. The certificate's signature is verified in any case."
        ),
    )
    store_assume_noeviction: bool = Field(
        default=False,
        examples=["false"],
        description=(
            "Set it to true to vouch for `maxmemory-policy noeviction` in a store whose `INFO` does not show it. "
            "`/v1/status` and the log say so."
        ),
    )
    store_confirm_in_replicas: bool = Field(
        default=False,
        examples=["true"],
        description=(
            "Set it to true to let each reply of the store count only once its replicas have confirmed it. After a "
            "failover to one of them nothing is in suspense. Set it for all agents of the region."
        ),
    )
    host: str = Field(default="127.0.0.1", min_length=1, examples=["127.0.0.1"], description="Address to listen on.")
    port: int = Field(default=8411, ge=0, le=65535, examples=[8411], description="Port to listen on.")
    uds: str | None = Field(
        default=None, examples=["/run/leasehold/agent.sock"], description="Unix socket to listen on instead."
    )
    grpc_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        examples=[8412],
        description=(
            "Port of the gRPC door, at which Envoy asks for its requests; without it there is none. Tokens and TLS "
            "files are those of the HTTP API."
        ),
    )
    grpc_host: str | None = Field(
        default=None, min_length=1, examples=["127.0.0.1"], description="Address of the gRPC door. Defaults to `HOST`."
    )
    grpc_max_streams: int = Field(
        default=1_000,
        ge=1,
        le=1_000_000,
        examples=[1_000],
        description="Calls that one connection of the gRPC door may have under way.",
    )
    quota_max_proxies: int = Field(
        default=500,
        ge=1,
        le=100_000,
        examples=[500],
        description="Proxies that may be connected by Envoy's quota protocol (RLQS).",
    )
    quota_max_buckets: int = Field(
        default=5_000, ge=1, le=1_000_000, examples=[5_000], description="Buckets that one such proxy may report."
    )
    grpc_max_message_bytes: int = Field(
        default=256 * 1024, ge=1024, le=64 * 1024 * 1024, examples=[262_144], description="Largest message of gRPC."
    )
    tls_cert_file: CertFile = None
    tls_key_file: KeyFile = None
    tls_client_ca_file: ClientCaFile = None
    tls_require_client_cert: RequireClientCert = True
    service_token: SecretStr | None = Field(
        default=None,
        examples=["a long random text"],
        description=(
            "Bearer token that services send. Required unless the agent listens on loopback or a unix socket. Several, "
            "separated by white space, are all valid, so that services can change from one to another."
        ),
    )
    adjust_token: SecretStr | None = Field(
        default=None,
        examples=["another long random text"],
        description=(
            "If set, adjustments and commits beyond a hold need this token, or one of several, instead of a service "
            "token."
        ),
    )
    service_identities: str = Field(
        default="",
        max_length=16_000,
        examples=["spiffe://example.org/billing spiffe://example.org/web"],
        description=(
            "Names in the client certificates of services that need no token, separated by white space: URIs such as "
            "SPIFFE IDs, or host names. Needs `TLS_CLIENT_CA_FILE`."
        ),
    )
    adjust_identities: str = Field(
        default="",
        max_length=16_000,
        examples=["spiffe://example.org/billing"],
        description="The same for services that may do what the adjust token permits.",
    )
    adjust_ceiling: int = Field(
        default=100, ge=1, le=1_000_000, examples=[100], description="Largest adjustment, as a multiple of the limit."
    )
    name: str = Field(
        default_factory=_own_name,
        min_length=1,
        max_length=128,
        examples=["agent-1"],
        description="Name in `/v1/status`; workers append their number. Defaults to host name and process id.",
    )
    workers: int = Field(
        default=1,
        ge=1,
        le=64,
        examples=[4],
        description="Processes that share the port. `leasehold agent --workers N` overrides it.",
    )
    report_interval_ms: int = Field(
        default=500, ge=10, le=60_000, examples=[500], description="How often an agent looks for reports that are due."
    )
    store_timeout_ms: int = Field(
        default=250, ge=1, le=60_000, examples=[250], description="Time-out of store calls other than decisions."
    )
    store_library: DirectoryPath | None = Field(
        default=None,
        examples=["/opt/leasehold-next/lua"],
        description=(
            "Directory of the Lua scripts that this agent runs in the store, to try or to keep another version than "
            "its release's. Other agents of the region may run theirs at the same time."
        ),
    )
    decision_timeout_ms: int = Field(
        default=5,
        ge=1,
        le=60_000,
        examples=[5],
        description="How long a check waits for the store before the failure modes of its policies answer.",
    )
    decision_timeout_max_ms: int = Field(
        default=50,
        ge=1,
        le=60_000,
        examples=[50],
        description=(
            "Upper bound to which the decision time-out grows while the store is slower. Set it equal "
            "to `DECISION_TIMEOUT_MS` for a fixed time-out."
        ),
    )
    breaker_failures: int = Field(
        default=5,
        ge=1,
        le=1000,
        examples=[5],
        description="Consecutive failed store calls that open the circuit breaker.",
    )
    breaker_pause_ms: int = Field(
        default=1000,
        ge=1,
        le=60_000,
        examples=[1000],
        description="Time between probes while the circuit breaker is open.",
    )
    lame_duck_ms: int = Field(
        default=5_000,
        ge=0,
        le=600_000,
        examples=[5_000],
        description=(
            "How long the agent keeps serving after SIGTERM while `/readyz` is already 503. Set it to "
            "the time that your load balancer needs to notice; 0 if it does not look at `/readyz`."
        ),
    )
    return_on_stop: bool = Field(
        default=False,
        examples=["false"],
        description=(
            "Set it to true for the last agent of a region: at shutdown it returns all unspent units "
            "and waits for open holds."
        ),
    )
    state_dir: Path | None = Field(
        default=None,
        examples=["/var/lib/leasehold"],
        description="Directory for the last known policies and blocks, to start while the coordinator is away.",
    )
    journal_dir: Path | None = Field(
        default=None,
        examples=["/var/lib/leasehold/journal"],
        description=(
            "Directory of the outage journal. Defaults to `journal` in the state directory. Without "
            "one, allowances fail closed while the store is away."
        ),
    )
    journal_max_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=4096,
        examples=[16_777_216],
        description="Size of the outage journal at which allowances fail closed.",
    )
    journal_max_ms: int = Field(
        default=15 * 60_000,
        ge=1000,
        examples=[900_000],
        description="Duration of a store outage after which allowances fail closed.",
    )
    decision_log_rows_per_second: int = Field(
        default=500,
        ge=0,
        le=10_000,
        examples=[500],
        description=(
            "Rows of the decision log that are kept of one second. Decisions beyond it are counted as lost. 0 disables "
            "the log."
        ),
    )
    decision_log_max_bytes: int = Field(
        default=8 * 1024 * 1024,
        ge=65_536,
        examples=[8_388_608],
        description=(
            "Memory for rows of the decision log, compressed, that wait for the coordinator. Beyond it the oldest are "
            "dropped and counted as lost."
        ),
    )
    max_body_bytes: int = Field(default=1024 * 1024, ge=1024, examples=[1_048_576], description="Largest request body.")
    max_header_bytes: int = Field(
        default=16 * 1024, ge=1024, examples=[16_384], description="Largest request line and headers together."
    )
    max_connections: int = Field(
        default=MAX_CONNECTIONS,
        ge=1,
        le=1_000_000,
        examples=[MAX_CONNECTIONS],
        description="Connections that may be open, per worker. Lower where the limit of file descriptors is lower.",
    )
    request_timeout_ms: int = Field(
        default=10_000,
        ge=10,
        le=3_600_000,
        examples=[10_000],
        description=(
            "Time within which the head of a request has to arrive; a body has to arrive at 1,000 bytes "
            "per second or more."
        ),
    )
    log_level: Annotated[LogLevel, Field(examples=["info"], description="`debug`, `info`, `warning` or `error`.")] = (
        "info"
    )

    @staticmethod
    def is_jwt_scope(scope: str) -> bool:
        return scope in SERVICE_SCOPES

    @field_validator("store_url")
    @classmethod
    def _is_a_store(cls, value: SecretStr) -> SecretStr:
        StoreAddress.parse(value.get_secret_value())  # its errors do not repeat the address
        return value

    @field_validator("service_token", "adjust_token")
    @classmethod
    def _are_tokens(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not all(map(is_token, tokens_in(value) or [""])):
            raise ValueError(f"a token has {MIN_TOKEN_CHARS} or more letters, digits or characters of -._~+/=")
        return value

    @field_validator("service_identities", "adjust_identities")
    @classmethod
    def _are_identities(cls, value: str) -> str:
        if wrong := [each for each in value.split() if not re.match(IDENTITY_PATTERN, each)]:
            raise ValueError(f"{wrong[0]!r} is neither a URI, such as spiffe://example.org/web, nor a host name")
        return value

    @field_validator("store_library")
    @classmethod
    def _is_a_library(cls, value: Path | None) -> Path | None:
        if value is not None:
            library_in(value)
        return value

    @model_validator(mode="after")
    def _has_a_use_for_each_store_setting(self) -> Self:
        address = self.store_address()
        prefix = "LEASEHOLD_AGENT_STORE"
        if address.password is not None and self.store_password is not None:
            raise ValueError(f"{prefix}_PASSWORD and a password in {prefix}_URL are both set; leave one of them out")
        for name in ("store_ca_file", "store_cert_file", "store_key_file"):
            if getattr(self, name) is not None and not address.has_tls:
                raise ValueError(
                    f"LEASEHOLD_AGENT_{name.upper()} is set, and {prefix}_URL is without TLS: it would have to begin"
                    " with rediss"
                )
        if self.store_key_file is not None and self.store_cert_file is None:
            raise ValueError(f"{prefix}_KEY_FILE is set without {prefix}_CERT_FILE")
        return self

    @model_validator(mode="after")
    def _can_authenticate_itself(self) -> Self:
        if self.coordinator_token is None and self.coordinator_cert_file is None:
            raise ValueError(
                "LEASEHOLD_AGENT_COORDINATOR_TOKEN is not set, and there is no client certificate in its place"
                " (LEASEHOLD_AGENT_COORDINATOR_CERT_FILE)"
            )
        return self

    @model_validator(mode="after")
    def _has_usable_certificates(self) -> Self:
        prefix = "LEASEHOLD_AGENT_COORDINATOR"
        check_client_files(prefix, self.coordinator_files(), has_tls=self.has_coordinator_tls)
        check_server_files("LEASEHOLD_AGENT_TLS", self.server_files())
        if self.uds is not None and self.tls_cert_file is not None:
            raise ValueError("LEASEHOLD_AGENT_TLS_CERT_FILE is set, and a unix socket (LEASEHOLD_AGENT_UDS) has no TLS")
        return self

    @model_validator(mode="after")
    def _can_verify_identities(self) -> Self:
        for name in ("service_identities", "adjust_identities"):
            if getattr(self, name).split() and self.tls_client_ca_file is None:
                raise ValueError(
                    f"LEASEHOLD_AGENT_{name.upper()} is set without LEASEHOLD_AGENT_TLS_CLIENT_CA_FILE, whose"
                    " authorities sign the certificates"
                )
        return self

    @property
    def has_identities(self) -> bool:
        return bool(self.service_identities.split() or self.adjust_identities.split())

    @property
    def coordinator_urls(self) -> list[str]:
        """Return the addresses of coordinators, each once."""
        return list(dict.fromkeys(self.coordinator_url.split(",")))

    @property
    def has_coordinator_tls(self) -> bool:
        return "https://" in self.coordinator_url

    def coordinator_files(self) -> TlsFiles:
        return TlsFiles(self.coordinator_ca_file, self.coordinator_cert_file, self.coordinator_key_file)

    def server_files(self) -> TlsFiles:
        return TlsFiles(self.tls_client_ca_file, self.tls_cert_file, self.tls_key_file)

    def store_files(self) -> TlsFiles:
        return TlsFiles(self.store_ca_file, self.store_cert_file, self.store_key_file)

    def store_address(self) -> StoreAddress:
        return StoreAddress.parse(self.store_url.get_secret_value())

    def store_access(self) -> StoreAccess:
        return StoreAccess(
            password=self.store_password,
            ca_file=self.store_ca_file,
            cert_file=self.store_cert_file,
            key_file=self.store_key_file,
            checks_hostname=self.store_check_hostname,
        )

    @model_validator(mode="after")
    def _requires_a_token_elsewhere(self) -> Self:
        if self.service_token is not None or self.jwt_issuer or self.has_identities:
            return self
        hosts = {"HOST": None if self.uds else self.host, "GRPC_HOST": self.grpc_address[0] if self.has_grpc else None}
        for name, host in hosts.items():
            if host is not None and not is_loopback(host):
                raise ValueError(
                    f"LEASEHOLD_AGENT_SERVICE_TOKEN is not set, and LEASEHOLD_AGENT_{name} is not loopback: an agent"
                    " that others can reach asks them for a token. Example:"
                    " LEASEHOLD_AGENT_SERVICE_TOKEN=<a long random text>"
                )
        return self

    @property
    def has_grpc(self) -> bool:
        return self.grpc_port is not None

    @property
    def grpc_address(self) -> tuple[str, int]:
        """Return where the gRPC door listens, if there is one."""
        return self.grpc_host or self.host, self.grpc_port or 0


def tokens_in(secret: SecretStr | None) -> list[str]:
    """Return the tokens of a setting that has one or several."""
    return secret.get_secret_value().split() if secret is not None else []


def is_token(text: str) -> bool:
    return len(text) >= MIN_TOKEN_CHARS and is_bearer(text)


def journal_of(settings: AgentSettings) -> Path | None:
    """Return the directory of the outage journal, if there is one: by default it is inside the state directory."""
    own = settings.state_dir / "journal" if settings.state_dir is not None else None
    return settings.journal_dir or own
