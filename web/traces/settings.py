"""The settings of traces, which both services have."""

from urllib.parse import unquote

from pydantic import Field, SecretStr, field_validator

from web.settings import READ_AT_START, Settings


class TraceSettings(Settings):
    """The settings of traces that both services have."""

    traces_url: str | None = Field(
        default=None,
        pattern=r"^https?://.+",
        examples=["http://127.0.0.1:4318/v1/traces"],
        description="Receiver of traces (OTLP over HTTP, binary). Without it nothing is traced.",
    )
    traces_headers: SecretStr | None = Field(
        default=None,
        examples=["x-api-key=…"],
        json_schema_extra=READ_AT_START,
        description="Headers for the receiver of traces: `name=value`, separated by commas, values percent-encoded.",
    )
    traces_ratio: float = Field(
        default=0.01,
        ge=0,
        le=1,
        examples=[0.01],
        description="Part of the requests without a `traceparent` that are traced. One with it is traced as it says.",
    )
    traces_keys: bool = Field(
        default=False,
        examples=[False],
        description="Whether spans have the keys of quotas, and with them the names of tenants, users and API keys.",
    )

    @field_validator("traces_headers")
    @classmethod
    def _are_headers(cls, value: SecretStr | None) -> SecretStr | None:
        pairs = [] if value is None else value.get_secret_value().split(",")
        if not all(name.strip() and equals for name, equals, _ in (pair.partition("=") for pair in pairs)):
            raise ValueError("each header has to be `name=value`")
        return value

    def headers_of_traces(self) -> dict[str, str]:
        pairs = [] if self.traces_headers is None else self.traces_headers.get_secret_value().split(",")
        return {name.strip(): unquote(value.strip()) for name, _, value in (pair.partition("=") for pair in pairs)}
