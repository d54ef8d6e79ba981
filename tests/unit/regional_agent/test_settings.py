"""A bad setting is explained by its variable, and a secret is never repeated."""

import pytest

from regional_agent.settings import AgentSettings
from web.settings import SettingsError, load_settings

GOOD = {
    "LEASEHOLD_AGENT_REGION": "us-east",
    "LEASEHOLD_AGENT_COORDINATOR_URL": "http://127.0.0.1:8400",
    "LEASEHOLD_AGENT_COORDINATOR_TOKEN": "lh_secret",
    "LEASEHOLD_AGENT_STORE_URL": "redis://:hunter2@127.0.0.1:6379/0",
}


def test_defaults_stay_on_loopback() -> None:
    settings = load_settings(AgentSettings, GOOD)
    assert (settings.host, settings.port, settings.service_token) == ("127.0.0.1", 8411, None)
    assert not settings.return_on_stop


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("REGION", "US East"),
        ("COORDINATOR_URL", "127.0.0.1:8400"),
        ("STORE_URL", "http://:hunter2@127.0.0.1"),
        ("STORE_URL", "redis://:hunter2@127.0.0.1?ssl=true"),
        ("STORE_CA_FILE", "/no/such/file"),
        ("PORT", "eighty"),
        ("WORKERS", "0"),
        ("WORKERS", "65"),
        ("WORKERS", "many"),
        ("REPORT_INTERVAL_MS", "0"),
        ("REGION", ""),
        ("SERVICE_TOKEN", "short"),
        ("SERVICE_TOKEN", "long-enough-token short"),
        ("SERVICE_TOKEN", " "),
        ("ADJUST_TOKEN", "with-an-ä-in-the-middle"),
        ("SERVICE_IDENTITIES", "spiffe://example.org/web *.internal"),
        ("ADJUST_IDENTITIES", "web"),
    ],
)
def test_a_bad_value_names_the_variable_and_gives_an_example(variable: str, value: str) -> None:
    name = f"LEASEHOLD_AGENT_{variable}"
    with pytest.raises(SettingsError) as raised:
        load_settings(AgentSettings, GOOD | {name: value})
    assert name in str(raised.value)
    assert "Example: " in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"PASSWORD": "x"}, "_PASSWORD and a password"),
        ({"PASSWORD_FILE": __file__}, "_PASSWORD and a password"),
        ({"CA_FILE": __file__}, "_CA_FILE is set, and LEASEHOLD_AGENT_STORE_URL is without TLS"),
        ({"URL": "rediss://a", "KEY_FILE": __file__}, "_KEY_FILE is set without"),
    ],
)
def test_a_store_setting_without_effect_is_refused(given: dict[str, str], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        load_settings(AgentSettings, GOOD | {f"LEASEHOLD_AGENT_STORE_{name}": value for name, value in given.items()})


def test_a_token_is_required_except_on_loopback() -> None:
    elsewhere = GOOD | {"LEASEHOLD_AGENT_HOST": "0.0.0.0"}
    with pytest.raises(SettingsError, match="LEASEHOLD_AGENT_SERVICE_TOKEN is not set"):
        load_settings(AgentSettings, elsewhere)
    assert load_settings(AgentSettings, elsewhere | {"LEASEHOLD_AGENT_SERVICE_TOKEN": "0123456789abcdef"})


@pytest.mark.parametrize("name", ["SERVICE_IDENTITIES", "ADJUST_IDENTITIES"])
def test_identities_need_an_authority_that_signs_their_certificates(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} is set without LEASEHOLD_AGENT_TLS_CLIENT_CA_FILE"):
        load_settings(AgentSettings, GOOD | {f"LEASEHOLD_AGENT_{name}": "spiffe://example.org/web"})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_has_many_names(host: str) -> None:
    assert load_settings(AgentSettings, GOOD | {"LEASEHOLD_AGENT_HOST": host})
