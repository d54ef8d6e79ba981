"""Read settings from the environment once, at the start, and explain each bad one.

A class of settings reads nothing by itself: `load_settings` passes it the environment, and tests pass it values. So
no variable takes effect by accident.
"""

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

S = TypeVar("S", bound="Settings")


class SettingsError(Exception):
    """Says for each bad variable its name, what is wrong, and an example."""


class Settings(BaseSettings):
    """The base of settings. A subclass sets `env_prefix` in `model_config`, and examples on its fields."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003  (the signature is pydantic's)
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def load_settings(cls: type[S], environ: Mapping[str, str] | None = None) -> S:
    """Return the settings of the environment. An empty variable counts as not set."""
    environ = os.environ if environ is None else environ
    given = {name: environ[variable_of(cls, name)] for name in cls.model_fields if environ.get(variable_of(cls, name))}
    try:
        return cls(**given)
    except ValidationError as error:
        faults = [_fault(cls, given, each) for each in error.errors(include_url=False)]
    raise SettingsError("\n".join(("The settings cannot be used:", *faults)))


def variable_of(cls: type[Settings], name: str) -> str:
    return f"{cls.model_config.get('env_prefix', '')}{name.upper()}"


def _fault(cls: type[Settings], given: Mapping[str, str], error: Mapping[str, Any]) -> str:
    reason = str(error["msg"]).removeprefix("Value error, ")
    for name, value in given.items():
        if is_secret(cls.model_fields[name]):
            reason = reason.replace(value, "***")
    if not error["loc"]:
        return f"  {reason}"
    name = str(error["loc"][0])
    field = cls.model_fields[name]
    problem = (
        "is not set, and there is no default" if error["type"] == "missing" else _wrong(field, given, name, reason)
    )
    return f"  {variable_of(cls, name)} {problem}.{_example(cls, name, field)}"


def _wrong(field: FieldInfo, given: Mapping[str, str], name: str, reason: str) -> str:
    value = "its value" if is_secret(field) else repr(given.get(name))
    return f"cannot be {value}: {reason[:1].lower()}{reason[1:].rstrip('.')}"


def _example(cls: type[Settings], name: str, field: FieldInfo) -> str:
    example = field.examples[0] if field.examples else field.default
    return f" Example: {variable_of(cls, name)}={example}" if field.examples or not field.is_required() else ""


def is_secret(field: FieldInfo) -> bool:
    return "SecretStr" in str(field.annotation) or field.annotation is SecretStr
