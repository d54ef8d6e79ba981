"""The containers get the settings that the settings classes declare."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from coordinator.settings import CoordinatorSettings
from leasehold.local_stack.plan import COORDINATOR_URL_VARIABLE, REGIONS, URL_VARIABLE, StackPlan
from regional_agent.settings import AgentSettings
from tools.build_hook import INNER, OUTER
from web.settings import Settings, SettingsError, load_settings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose/compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
CONTAINERFILE = (ROOT / "compose/Containerfile").read_text()
EXAMPLE = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / "compose/example.env").read_text(), re.MULTILINE))
COORDINATORS = ("coordinator", "coordinator-2")
OURS: dict[str, type[Settings]] = dict.fromkeys(COORDINATORS, CoordinatorSettings) | {
    f"agent-{name}": AgentSettings for name in REGIONS
}
FILLED = "0123456789abcdef" * 3  # as made by `openssl rand -hex 24`
OTHERS = {name: f"{name}x" for name in EXAMPLE}
VARIABLE = r"\$\{(\w+):[?-]\}"


def environment(service: str, values: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a service's environment with the example filled in, or with other `values`."""
    filled = dict.fromkeys(EXAMPLE, FILLED) | dict(values or {})
    given: dict[str, str] = SERVICES[service]["environment"]
    return {name: re.sub(VARIABLE, lambda found: filled[found[1]], value) for name, value in given.items()}


def strings(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def test_every_region_has_a_store_and_an_agent() -> None:
    pairs = {name for region in REGIONS for name in (f"store-{region}", f"agent-{region}")}
    assert set(SERVICES) == pairs | {"postgres", "migrate", "prometheus", *COORDINATORS}


@pytest.mark.parametrize("service", OURS)
def test_variables_are_fields_of_the_settings(service: str) -> None:
    prefix = str(OURS[service].model_config.get("env_prefix"))
    told = {name.removeprefix(prefix).lower() for name in SERVICES[service]["environment"] if name != "HEALTH_URL"}
    assert told <= set(OURS[service].model_fields)


@pytest.mark.parametrize("service", OURS)
def test_the_settings_accept_the_environment(service: str) -> None:
    load_settings(OURS[service], environment(service))


@pytest.mark.parametrize("region", REGIONS)
def test_an_agent_without_its_token_refuses_to_start(region: str) -> None:
    service = f"agent-{region}"
    with pytest.raises(SettingsError, match="LEASEHOLD_AGENT_COORDINATOR_TOKEN"):
        load_settings(AgentSettings, environment(service, dict.fromkeys(EXAMPLE, "")))


@pytest.mark.parametrize("region", REGIONS)
def test_an_agent_finds_its_store_and_both_coordinators(region: str) -> None:
    told = environment(f"agent-{region}")
    aliases = {alias for each in COORDINATORS for alias in SERVICES[each]["networks"]["default"]["aliases"]}
    ports = {environment(each)["LEASEHOLD_COORDINATOR_PORT"] for each in COORDINATORS}
    assert told["LEASEHOLD_AGENT_REGION"] == region
    assert urlsplit(told["LEASEHOLD_AGENT_STORE_URL"]).hostname == f"store-{region}"
    address = urlsplit(told["LEASEHOLD_AGENT_COORDINATOR_URL"])
    assert ({address.hostname}, {str(address.port)}) == (aliases, ports)
    assert SERVICES[f"agent-{region}"]["environment"]["LEASEHOLD_AGENT_COORDINATOR_TOKEN"] == (
        f"${{TOKEN_{region.upper().replace('-', '_')}:-}}"
    )


def test_owner_and_coordinator_use_the_same_database() -> None:
    urls = (environment("migrate")[URL_VARIABLE], environment("coordinator")["LEASEHOLD_COORDINATOR_DATABASE_URL"])
    told = SERVICES["postgres"]["environment"]
    for url in map(urlsplit, urls):
        assert (url.hostname, url.port, url.path) == ("postgres", 5432, f"/{told['POSTGRES_DB']}")
    owner, coordinator = urls
    assert urlsplit(owner).username == told["POSTGRES_USER"]
    assert environment("migrate")[COORDINATOR_URL_VARIABLE] == coordinator


def test_the_coordinator_does_not_log_in_as_the_owner() -> None:
    urls = (environment("migrate", OTHERS)[URL_VARIABLE], environment("migrate", OTHERS)[COORDINATOR_URL_VARIABLE])
    owner, coordinator = map(urlsplit, urls)
    assert owner.username != coordinator.username
    assert owner.password != coordinator.password


def test_ports_are_those_of_the_local_stack_and_published_on_loopback_only() -> None:
    plan = StackPlan(data=Path())
    outside = {"coordinator": plan.coordinator_port, "coordinator-2": plan.coordinator_port + 1}
    outside |= {f"agent-{name}": plan.agent_port(name) for name in REGIONS}
    for service, port in outside.items():
        [inside] = [value for name, value in environment(service).items() if name.endswith("_PORT")]
        assert SERVICES[service]["ports"] == [f"127.0.0.1:{port}:{inside}"]
        assert re.search(rf"^EXPOSE .*\b{inside}\b", CONTAINERFILE, re.MULTILINE)
    assert {name for name in SERVICES if "ports" in SERVICES[name]} == {*outside, "prometheus"}
    assert all(port.startswith("127.0.0.1:") for each in SERVICES.values() for port in each.get("ports", []))


@pytest.mark.parametrize("service", sorted(set(SERVICES) - {"migrate"}))
def test_every_long_running_service_has_a_health_check(service: str) -> None:
    assert SERVICES[service]["healthcheck"]["test"]
    if service in OURS:
        [port] = [value for name, value in environment(service).items() if name.endswith("_PORT")]
        default = re.findall(r"HEALTH_URL=(\S+)", CONTAINERFILE)[0]
        assert urlsplit(environment(service).get("HEALTH_URL", default)).port == int(port)


def test_dependencies_of_services_exist() -> None:
    waited_for = {name for service in SERVICES.values() for name in service.get("depends_on", {})}
    mounted = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert waited_for <= set(SERVICES)
    assert {name for name in mounted if not name.startswith("./")} == set(COMPOSE["volumes"])


def test_prometheus_scrapes_every_process_of_ours() -> None:
    jobs = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])["scrape_configs"]
    targets = {target for job in jobs for each in job["static_configs"] for target in each["targets"]}
    ports = {name: next(v for k, v in environment(name).items() if k.endswith("_PORT")) for name in OURS}
    assert targets == {f"{name}:{port}" for name, port in ports.items()}


def test_stores_persist_and_never_evict() -> None:
    lines = COMPOSE["configs"]["store"]["content"].splitlines()
    assert {"maxmemory-policy noeviction", "appendonly yes"} <= set(lines)


def test_no_secret_is_written_down() -> None:
    asked_for = {name for text in strings(COMPOSE) for name in re.findall(VARIABLE, text)}
    assert asked_for == set(EXAMPLE)
    assert set(EXAMPLE.values()) == {""}
    for text in strings(COMPOSE):
        assert not re.search(r"://[^/$]*:[^/$]+@", text), text


def test_the_image_runs_unprivileged_from_pinned_packages() -> None:
    last_stage = CONTAINERFILE.rsplit("\nFROM ", 1)[1]
    assert re.search(r"^USER [1-9]\d{3,}:", last_stage, re.MULTILINE)
    assert "\nHEALTHCHECK " in last_stage
    installs = re.findall(r"pip install .*-r", CONTAINERFILE)
    assert installs
    assert all("--require-hashes" in install for install in installs)


def test_the_image_has_every_package_of_the_wheel_and_what_builds_it() -> None:
    copied = set(re.findall(r"^COPY (\w+) \1$", CONTAINERFILE, re.MULTILINE))
    assert copied == {OUTER, *INNER, "tools"}
