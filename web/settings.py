"""Read settings from the environment once, at the start, and explain each bad one.

A class of settings reads nothing by itself: `load_settings` passes it the environment, and tests pass it values. So
no variable takes effect by accident.

Each secret may be in a file instead (`credentials/secret_files.py`). It is read again while the service runs, unless
the field says that it is read at the start only (`READ_AT_START`).
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from web.credentials.file_secret import FileSecret
from web.credentials.secret_files import SUFFIX, SecretFileError, read_secret

S = TypeVar("S", bound="Settings")
Values = dict[str, str]  # by the names of fields

READ_AT_START: dict[str, Any] = {"read_at_start": True}  # as `json_schema_extra` of a secret


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
    values, faults = _values(cls, environ)
    settings = _validate(cls, values, faults)
    files = {name: file for name in values if (file := _file_of(cls, name, values, environ))}
    return settings.model_copy(update=files)


def _values(cls: type[Settings], environ: Mapping[str, str]) -> tuple[Values, dict[str, str]]:
    """Return what is given for each field, and what is wrong with secrets that cannot be read."""
    values: Values = {}
    faults: dict[str, str] = {}
    for name, field in cls.model_fields.items():
        variable = variable_of(cls, name)
        try:
            value = read_secret(environ, variable) if is_secret(field) else environ.get(variable)
        except SecretFileError as error:
            faults[name] = f"  {error}."
        else:
            values |= {name: value} if value else {}
    return values, faults


def _validate(cls: type[S], values: Values, unreadable: Mapping[str, str]) -> S:
    faults = list(unreadable.values())
    try:
        settings = cls(**values)
    except ValidationError as error:
        faults += [_fault(cls, values, each) for each in error.errors(include_url=False) if _is_news(each, unreadable)]
    else:
        if not faults:
            return settings
    raise SettingsError("\n".join(("The settings cannot be used:", *faults)))


def _is_news(error: Mapping[str, Any], unreadable: Mapping[str, str]) -> bool:
    """Return whether a fault is none that an unreadable secret causes."""
    return error["loc"][0] not in unreadable if error["loc"] else not unreadable


def _file_of(cls: type[S], name: str, values: Values, environ: Mapping[str, str]) -> FileSecret | None:
    """Return the secret of a field that is in a file and may change."""
    variable, field = variable_of(cls, name), cls.model_fields[name]
    path = environ.get(variable + SUFFIX)
    if not (path and is_secret(field) and is_read_again(field)):
        return None
    return FileSecret(variable, Path(path), values[name], partial(_check, cls, name, values))


def _check(cls: type[S], name: str, values: Values, value: str) -> None:
    """Raise a ValueError unless the settings accept another value of a field."""
    try:
        _validate(cls, {**values, name: value}, {})
    except SettingsError as error:
        raise ValueError(str(error).partition("\n")[2].strip()) from None


def variable_of(cls: type[Settings], name: str) -> str:
    return f"{cls.model_config.get('env_prefix', '')}{name.upper()}"


def _fault(cls: type[Settings], values: Mapping[str, str], error: Mapping[str, Any]) -> str:
    reason = str(error["msg"]).removeprefix("Value error, ")
    for name, value in values.items():
        if is_secret(cls.model_fields[name]):
            reason = reason.replace(value, "***")
    if not error["loc"]:
        return f"  {reason}"
    name = str(error["loc"][0])
    field = cls.model_fields[name]
    problem = (
        "is not set, and there is no default" if error["type"] == "missing" else _wrong(field, values, name, reason)
    )
    return f"  {variable_of(cls, name)} {problem}.{_example(cls, name, field)}"


def _wrong(field: FieldInfo, values: Mapping[str, str], name: str, reason: str) -> str:
    value = "its value" if is_secret(field) else repr(values.get(name))
    return f"cannot be {value}: {reason[:1].lower()}{reason[1:].rstrip('.')}"


def _example(cls: type[Settings], name: str, field: FieldInfo) -> str:
    example = field.examples[0] if field.examples else field.default
    return f" Example: {variable_of(cls, name)}={example}" if field.examples or not field.is_required() else ""


def is_secret(field: FieldInfo) -> bool:
    return "SecretStr" in str(field.annotation) or field.annotation is SecretStr


def is_read_again(field: FieldInfo) -> bool:
    """Return whether a secret in a file may change while the service runs."""
    return field.json_schema_extra != READ_AT_START
