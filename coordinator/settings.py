"""The settings of a coordinator. `main` reads them from the environment once, and passes them on."""

from typing import Annotated, Literal, Self

from pydantic import Field, PostgresDsn, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from coordinator.access.rules.scopes import is_scope
from coordinator.archives.store import is_location
from coordinator.decision_log.kafka_settings import KafkaSettings
from migrations.connect import urls_of_hosts
from protocol.messages import MAX_LANES
from protocol.units import MAX_UNITS
from web.connections import MAX_CONNECTIONS
from web.credentials.jwt_settings import JwtSettings
from web.tls.context import TlsFiles
from web.tls.settings import CertFile, ClientCaFile, KeyFile, RequireClientCert, check_server_files
from web.traces.settings import TraceSettings

LogLevel = Literal["debug", "info", "warning", "error"]


class CoordinatorSettings(JwtSettings, KafkaSettings, TraceSettings):
    model_config = SettingsConfigDict(env_prefix="LEASEHOLD_COORDINATOR_")

    database_url: SecretStr = Field(
        examples=["postgresql://leasehold:secret@127.0.0.1:5432/leasehold"],
        description=(
            "PostgreSQL, as a user with the role `leasehold_coordinator`, not as the owner of the schema. Each new "
            "connection uses the URL as it is then. It may name several hosts, of which the primary is used: "
            "`postgresql://user@h1:5432,h2:5432/leasehold`."
        ),
    )
    host: str = Field(default="127.0.0.1", min_length=1, examples=["127.0.0.1"], description="Address to listen on.")
    port: int = Field(default=8400, ge=0, le=65535, examples=[8400], description="Port to listen on.")
    tls_cert_file: CertFile = None
    tls_key_file: KeyFile = None
    tls_client_ca_file: ClientCaFile = None
    tls_require_client_cert: RequireClientCert = True
    installation: str = Field(
        default="",
        max_length=200,
        examples=["production"],
        description=(
            "Name of this environment, such as `production`. A copy of the database with another name "
            "sends no webhooks; without a name the address of the database is compared."
        ),
    )
    seller: str = Field(
        default="",
        max_length=1000,
        examples=["Example Inc. | 1 Main Street | Springfield"],
        description="Your company, as statements on paper show it: its name and the lines of its address, between `|`.",
    )
    lanes: int = Field(
        default=4,
        ge=1,
        le=MAX_LANES,
        examples=[4],
        description="Number of lanes of an epoch. Applies to epochs opened from now on.",
    )
    lease_ms: int = Field(
        default=120_000,
        ge=1_000,
        le=86_400_000,
        examples=[120_000],
        description="How long a region may spend a lease after its last renewal.",
    )
    expire_every_ms: int = Field(
        default=1_000, ge=10, le=86_400_000, examples=[1_000], description="How often expired leases are looked for."
    )
    close_grace_ms: int = Field(
        default=900_000,
        ge=0,
        le=3_024_000_000,
        examples=[900_000],
        description="How long a period that is being closed waits for regions to report.",
    )
    close_hold_wait_ms: int = Field(
        default=3_600_000,
        ge=0,
        le=3_024_000_000,
        examples=[3_600_000],
        description="How much longer it waits for open holds.",
    )
    late_usage_days: int = Field(
        default=35,
        ge=0,
        le=3650,
        examples=[35],
        description="Usage of a closed period that arrives later than this waits in quarantine for a decision.",
    )
    implausible_limit_factor: int = Field(
        default=10,
        ge=0,
        le=1_000_000,
        examples=[10],
        description=(
            "Usage beyond its grants that one region may report per quota and period without approval: "
            "this many times the limit, plus `IMPLAUSIBLE_FLOOR_UNITS`."
        ),
    )
    implausible_floor_units: int = Field(
        default=1_000_000, ge=0, le=MAX_UNITS, examples=[1_000_000], description="See `IMPLAUSIBLE_LIMIT_FACTOR`."
    )
    new_keys_per_minute: int = Field(
        default=10_000, ge=1, examples=[10_000], description="Budget per region: quota keys that never had a pool."
    )
    new_periods_per_minute: int = Field(
        default=60,
        ge=1,
        examples=[60],
        description="Budget per region: periods that only a report without a grant names.",
    )
    epochs_per_minute: int = Field(default=240, ge=1, examples=[240], description="Budget per region: epochs opened.")
    journal_epochs_per_minute: int = Field(
        default=240, ge=1, examples=[240], description="Budget per region: epochs opened for outage journals."
    )
    quarantine_rows_per_minute: int = Field(
        default=2_000, ge=1, examples=[2_000], description="Budget per region: rows of evidence kept in quarantine."
    )
    quarantine_bytes_per_minute: int = Field(
        default=4 * 1024 * 1024,
        ge=1,
        examples=[4_194_304],
        description="Budget per region: bytes of evidence kept in quarantine.",
    )
    decisions_per_minute: int = Field(
        default=300_000, ge=1, examples=[300_000], description="Budget per region: rows of the decision log."
    )
    decision_retention_days: int = Field(
        default=7,
        ge=0,
        le=366,
        examples=[7],
        description=(
            "How many days the decision log is kept, beside the current one (UTC). Each day is dropped as a whole. "
            "0: nothing is kept in PostgreSQL."
        ),
    )
    growth_factor: int = Field(
        default=10,
        ge=0,
        le=1_000_000,
        examples=[10],
        description=(
            "How many times the 95th percentile of a tenant's own hours an hour's usage of a quota must be to count as "
            "sudden growth (`usage.grown`). 0 disables it."
        ),
    )
    growth_floor_units: int = Field(
        default=1_000,
        ge=1,
        le=MAX_UNITS,
        examples=[1_000],
        description="Usage of an hour below this is never sudden growth.",
    )
    used_up_after_ms: int = Field(
        default=300_000,
        ge=60_000,
        le=900_000,
        examples=[300_000],
        description="How long an allowance must have nothing left to be announced (`allowance.used_up`).",
    )
    clock_warn_ms: int = Field(
        default=1_000,
        ge=1,
        le=86_400_000,
        examples=[1_000],
        description="Difference from the database's clock at which the coordinator is degraded.",
    )
    clock_limit_ms: int = Field(
        default=5_000,
        ge=0,
        le=86_400_000,
        examples=[5_000],
        description=(
            "Difference from the database's clock at which the coordinator is not ready and decides "
            "nothing. 0 disables the comparison."
        ),
    )
    database_pool_size: int = Field(default=8, ge=1, le=1000, examples=[8], description="Connections to PostgreSQL.")
    max_body_bytes: int = Field(
        default=16 * 1024 * 1024, ge=1024, examples=[16_777_216], description="Largest request body."
    )
    max_header_bytes: int = Field(
        default=16 * 1024, ge=1024, examples=[16_384], description="Largest request line and headers together."
    )
    max_connections: int = Field(
        default=MAX_CONNECTIONS,
        ge=1,
        le=1_000_000,
        examples=[MAX_CONNECTIONS],
        description="Connections that may be open, per process. Lower where the limit of file descriptors is lower.",
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
    archive: str = Field(
        default="",
        max_length=1000,
        examples=["s3://ledger-archive/production?region=eu-central-1"],
        description=(
            "Where archived periods are written and read: the path of a directory that all coordinators share, or "
            "`s3://BUCKET/PREFIX` with the options `region`, `endpoint_override` and `scheme`. Keys come from the "
            "variables `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or from the machine's role."
        ),
    )
    log_level: Annotated[LogLevel, Field(examples=["info"], description="`debug`, `info`, `warning` or `error`.")] = (
        "info"
    )

    @staticmethod
    def is_jwt_scope(scope: str) -> bool:
        return is_scope(scope)

    @field_validator("archive")
    @classmethod
    def _is_location(cls, value: str) -> str:
        if value and not is_location(value):
            raise ValueError("it must be an absolute path, or s3://BUCKET/PREFIX without a key")
        return value

    @field_validator("database_url")
    @classmethod
    def _is_postgres(cls, value: SecretStr) -> SecretStr:
        try:
            PostgresDsn(value.get_secret_value())
        except ValueError:
            # Pydantic's own message would repeat the value, and with it the password.
            raise ValueError("it must look like postgresql://user:password@host:port/database") from None
        list(urls_of_hosts(value.get_secret_value()))  # its errors do not repeat the address
        return value

    @model_validator(mode="after")
    def _has_usable_certificates(self) -> Self:
        check_server_files("LEASEHOLD_COORDINATOR_TLS", self.server_files())
        return self

    def server_files(self) -> TlsFiles:
        return TlsFiles(self.tls_client_ca_file, self.tls_cert_file, self.tls_key_file)
