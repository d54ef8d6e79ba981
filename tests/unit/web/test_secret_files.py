"""A secret may be in a file, which is explained if it cannot be used, and read again while a service runs."""

from pathlib import Path

import pytest
import structlog
from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from web.credentials.file_secret import READ_EVERY_S, FileSecret
from web.credentials.secret_files import MAX_BYTES
from web.settings import READ_AT_START, Settings, SettingsError, load_settings


class Shop(Settings):
    model_config = SettingsConfigDict(env_prefix="SHOP_")

    key: SecretStr = Field(min_length=8, examples=["a long key"])
    seal: SecretStr | None = Field(default=None, json_schema_extra=READ_AT_START)
    sign: str = "open"

    @field_validator("key")
    @classmethod
    def _is_one_word(cls, key: SecretStr) -> SecretStr:
        if " " in key.get_secret_value():
            raise ValueError("it has a space")
        return key


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_text("first-key\n")
    return file


def error_of(**environ: str) -> str:
    with pytest.raises(SettingsError) as raised:
        load_settings(Shop, environ)
    return str(raised.value).partition("\n")[2]


@pytest.mark.parametrize("content", ["first-key", "first-key\n", "first-key\r\n"])
def test_a_secret_is_the_content_of_its_file_without_the_end_of_the_line(file: Path, content: str) -> None:
    file.write_bytes(content.encode())
    shop = load_settings(Shop, {"SHOP_KEY_FILE": str(file)})
    assert shop.key.get_secret_value() == "first-key"
    assert "first-key" not in repr(shop)


def test_only_secrets_are_read_from_files(file: Path) -> None:
    assert load_settings(Shop, {"SHOP_KEY_FILE": str(file), "SHOP_SIGN_FILE": str(file)}).sign == "open"


def test_a_variable_and_its_file_exclude_each_other(file: Path) -> None:
    both = error_of(SHOP_KEY="another-key", SHOP_KEY_FILE=str(file))
    assert both == "  SHOP_KEY and SHOP_KEY_FILE are both set; leave one of them out."


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xff\xfe long enough", "is not UTF-8"),
        (b"x" * (MAX_BYTES + 1), f"is larger than {MAX_BYTES} bytes"),
    ],
)
def test_a_file_that_cannot_be_used_names_its_variable(file: Path, content: bytes | None, reason: str) -> None:
    file.unlink() if content is None else file.write_bytes(content)
    assert error_of(SHOP_KEY_FILE=str(file)) == f"  SHOP_KEY_FILE names {str(file)!r}, which {reason}."


def test_a_directory_is_no_secret(tmp_path: Path) -> None:
    assert "cannot be read: Is a directory" in error_of(SHOP_KEY_FILE=str(tmp_path))


def test_the_rules_of_a_setting_hold_for_its_file_and_do_not_repeat_it(file: Path) -> None:
    file.write_text("hunter2 is wrong")
    assert error_of(SHOP_KEY_FILE=str(file)).startswith("  SHOP_KEY cannot be its value: it has a space.")


def test_each_fault_is_named(tmp_path: Path) -> None:
    lines = error_of(SHOP_KEY_FILE=str(tmp_path / "none"), SHOP_SEAL_FILE=str(tmp_path / "no")).splitlines()
    assert [line.split()[0] for line in lines] == ["SHOP_KEY_FILE", "SHOP_SEAL_FILE"]


class Moment:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pass_on(self) -> None:
        self.now_s += READ_EVERY_S


def refuse_short_keys(value: str) -> None:
    if len(value) < 8:
        raise ValueError("SHOP_KEY cannot be its value: too short")


def test_a_file_is_read_again_once_a_second(file: Path) -> None:
    clock = Moment()
    secret = FileSecret("SHOP_KEY", file, "first-key", refuse_short_keys, clock)
    file.write_text("second-key\n")
    assert secret.get_secret_value() == "first-key"
    clock.pass_on()
    assert secret.get_secret_value() == "second-key"


def test_the_last_usable_content_stays_in_use_and_the_reason_is_logged_once(file: Path) -> None:
    clock = Moment()
    secret = FileSecret("SHOP_KEY", file, "first-key", refuse_short_keys, clock)
    with structlog.testing.capture_logs() as logs:
        for content in ("short", "short", None, "third-key"):
            file.unlink() if content is None else file.write_text(content)
            clock.pass_on()
            assert secret.get_secret_value() == ("third-key" if content == "third-key" else "first-key")
    reasons = [each.get("reason", each["event"]) for each in logs]
    assert reasons[0] == "SHOP_KEY cannot be its value: too short"
    assert "No such file" in reasons[1]
    assert reasons[2:] == ["a secret was read again"]


def test_settings_apply_their_rules_to_a_file_that_changes(file: Path) -> None:
    key = load_settings(Shop, {"SHOP_KEY_FILE": str(file)}).key
    assert isinstance(key, FileSecret)
    for refused in ("short", "two words here"):
        with pytest.raises(ValueError, match="SHOP_KEY cannot be its value") as raised:
            key._check(refused)
        assert refused not in str(raised.value)
    key._check("fine-and-long")


def test_a_secret_that_is_used_only_at_the_start_is_not_read_again(file: Path) -> None:
    shop = load_settings(Shop, {"SHOP_KEY": "long-enough", "SHOP_SEAL_FILE": str(file)})
    assert shop.seal is not None
    assert not isinstance(shop.seal, FileSecret)
    assert shop.seal.get_secret_value() == "first-key"
