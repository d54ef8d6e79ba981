"""What a coordinator is told by its environment. Read once, by `main`, and by nobody else."""

from typing import Annotated, Literal

from pydantic import Field, PostgresDsn, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from protocol.messages import MAX_LANES
from protocol.units import MAX_UNITS
from web.connections import MAX_CONNECTIONS
from web.settings import Settings

LogLevel = Literal["debug", "info", "warning", "error"]


class CoordinatorSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="LEASEHOLD_COORDINATOR_")

    database_url: SecretStr = Field(examples=["postgresql://leasehold:secret@127.0.0.1:5432/leasehold"])
    host: str = Field(default="127.0.0.1", min_length=1, examples=["127.0.0.1"])
    port: int = Field(default=8400, ge=0, le=65535, examples=[8400])
    installation: str = Field(default="", max_length=200, examples=["production"])  # compared in place of addresses
    lanes: int = Field(default=4, ge=1, le=MAX_LANES, examples=[4])  # of epochs that are opened from now on
    lease_ms: int = Field(default=120_000, ge=1_000, le=86_400_000, examples=[120_000])
    refresh_ms: int = Field(default=5_000, ge=100, le=3_600_000, examples=[5_000])
    expire_every_ms: int = Field(default=1_000, ge=10, le=86_400_000, examples=[1_000])
    close_grace_ms: int = Field(default=900_000, ge=0, le=3_024_000_000, examples=[900_000])  # for regions to report
    close_hold_wait_ms: int = Field(default=3_600_000, ge=0, le=3_024_000_000, examples=[3_600_000])  # after the grace
    late_usage_days: int = Field(default=35, ge=0, le=3650, examples=[35])  # later, usage waits for people
    # One region's usage of a quota beyond its grants, in a period: more than so many times the limit, and so many units
    # on top, waits in quarantine for people.
    implausible_limit_factor: int = Field(default=10, ge=0, le=1_000_000, examples=[10])
    implausible_floor_units: int = Field(default=1_000_000, ge=0, le=MAX_UNITS, examples=[1_000_000])
    # What one region may make this coordinator keep or look at in a minute: coordinator/exchange/budgets.py.
    new_keys_per_minute: int = Field(default=10_000, ge=1, examples=[10_000])
    new_periods_per_minute: int = Field(default=60, ge=1, examples=[60])
    epochs_per_minute: int = Field(default=240, ge=1, examples=[240])
    journal_epochs_per_minute: int = Field(default=240, ge=1, examples=[240])
    quarantine_rows_per_minute: int = Field(default=2_000, ge=1, examples=[2_000])
    quarantine_bytes_per_minute: int = Field(default=4 * 1024 * 1024, ge=1, examples=[4_194_304])
    clock_warn_ms: int = Field(default=1_000, ge=1, le=86_400_000, examples=[1_000])  # differs from the database's
    clock_limit_ms: int = Field(default=5_000, ge=0, le=86_400_000, examples=[5_000])  # 0: is not compared
    database_pool_size: int = Field(default=8, ge=1, le=1000, examples=[8])
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024, examples=[16_777_216])
    max_header_bytes: int = Field(default=16 * 1024, ge=1024, examples=[16_384])
    max_connections: int = Field(default=MAX_CONNECTIONS, ge=1, le=1_000_000, examples=[MAX_CONNECTIONS])
    request_timeout_ms: int = Field(default=10_000, ge=10, le=3_600_000, examples=[10_000])  # for it to arrive
    log_level: Annotated[LogLevel, Field(examples=["info"])] = "info"

    @field_validator("database_url")
    @classmethod
    def _is_postgres(cls, value: SecretStr) -> SecretStr:
        try:
            PostgresDsn(value.get_secret_value())
        except ValueError:
            # Pydantic's own message would repeat the value, and with it the password.
            raise ValueError("it must look like postgresql://user:password@host:port/database") from None
        return value
