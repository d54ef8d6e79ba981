"""A settings error names the variable and an example, and never the password."""

import pytest

from coordinator.settings import CoordinatorSettings
from web.settings import SettingsError, load_settings

URL = {"LEASEHOLD_COORDINATOR_DATABASE_URL": "postgresql://me:hunter2@127.0.0.1:5432/leasehold"}


def test_the_address_of_the_database_is_enough() -> None:
    settings = load_settings(CoordinatorSettings, URL)
    assert (settings.host, settings.port, settings.lanes) == ("127.0.0.1", 8400, 4)
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DATABASE_URL", ""),
        ("DATABASE_URL", "mysql://me:hunter2@127.0.0.1/leasehold"),
        ("DATABASE_URL", "hunter2"),
        ("PORT", "70000"),
        ("LANES", "0"),
        ("LANES", "65"),
        ("LEASE_MS", "soon"),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_is_explained(variable: str, value: str) -> None:
    name = f"LEASEHOLD_COORDINATOR_{variable}"
    with pytest.raises(SettingsError) as error:
        load_settings(CoordinatorSettings, URL | {name: value})
    assert name in str(error.value)
    assert "Example" in str(error.value)
    assert "hunter2" not in str(error.value)
