"""Settings are read once, and a bad one is explained without revealing secrets."""

from typing import Self

import pytest
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from web.settings import Settings, SettingsError, load_settings


class Shop(Settings):
    model_config = SettingsConfigDict(env_prefix="SHOP_")

    url: SecretStr = Field(examples=["postgresql://user:password@host:5432/db"])
    port: int = Field(default=8400, ge=1, le=65535, examples=["8400"])
    name: str = Field(default="shop", min_length=2)
    uds: str | None = None
    key: SecretStr | None = None
    loud: bool = False

    @field_validator("url")
    @classmethod
    def _has_a_scheme(cls, url: SecretStr) -> SecretStr:
        if "://" not in url.get_secret_value():
            raise ValueError(f"{url.get_secret_value()} has no scheme.")
        return url

    @model_validator(mode="after")
    def _loud_needs_a_key(self) -> Self:
        if self.loud and self.key is None:
            raise ValueError("SHOP_KEY is needed where SHOP_LOUD is true, e.g. SHOP_KEY=lh_…")
        return self


URL = "postgresql://u:hunter2@h/d"
GOOD = {"SHOP_URL": URL}


def test_given_settings_are_read_and_others_have_defaults() -> None:
    shop = load_settings(Shop, {**GOOD, "SHOP_PORT": "9000", "SHOP_UDS": "", "SHOP_LOUDER": "x", "PORT": "1"})
    assert (shop.url.get_secret_value(), shop.port, shop.uds, shop.loud) == (URL, 9000, None, False)


def test_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_URL", URL)
    assert load_settings(Shop).url.get_secret_value() == URL


def test_a_class_reads_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_PORT", "9000")
    assert Shop(url=SecretStr(URL)).port == 8400


def test_settings_are_immutable() -> None:
    shop = load_settings(Shop, GOOD)
    with pytest.raises(ValidationError):
        shop.port = 1
    assert "hunter2" not in repr(shop)


def _error(environ: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(Shop, environ)
    return str(caught.value)


@pytest.mark.parametrize("environ", [{}, {"SHOP_URL": ""}])
def test_a_missing_setting_is_named(environ: dict[str, str]) -> None:
    assert _error(environ).splitlines()[1:] == [
        "  SHOP_URL is not set, and there is no default. Example: SHOP_URL=postgresql://user:password@host:5432/db"
    ]


def test_a_bad_value_is_named() -> None:
    text = _error({**GOOD, "SHOP_PORT": "99999"})
    assert "SHOP_PORT cannot be '99999': input should be less than or equal to 65535." in text
    assert "Example: SHOP_PORT=8400" in text


def test_every_bad_setting_is_named() -> None:
    text = _error({"SHOP_PORT": "x", "SHOP_NAME": "a", "SHOP_LOUD": "perhaps"})
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["SHOP_URL", "SHOP_PORT", "SHOP_NAME", "SHOP_LOUD"]


def test_a_secret_is_never_revealed() -> None:
    text = _error({"SHOP_URL": "hunter2"})
    assert "hunter2" not in text
    assert "SHOP_URL cannot be its value: *** has no scheme. Example:" in text


def test_rules_over_several_settings() -> None:
    assert _error({**GOOD, "SHOP_LOUD": "true"}).splitlines()[1:] == [
        "  SHOP_KEY is needed where SHOP_LOUD is true, e.g. SHOP_KEY=lh_…"
    ]
