"""The chart, the plain manifests and the systemd units are valid, and say what the services understand."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from coordinator.settings import CoordinatorSettings
from leasehold.local_stack.plan import COORDINATOR_URL_VARIABLE, URL_VARIABLE
from regional_agent.settings import AgentSettings
from tests.parts import part, toolchain
from tools.manifests import CHART, COMPOSE, MANIFESTS, plain_manifests, rendered
from web.credentials.secret_files import SUFFIX, read_secret
from web.settings import Settings, load_settings

Manifest = dict[str, Any]

KUBERNETES = ("1.30", "1.34")
OF_THE_PROMETHEUS_OPERATOR = {"ServiceMonitor", "PrometheusRule"}
CLASSES: Mapping[str, type[Settings]] = {"coordinator": CoordinatorSettings, "agent": AgentSettings}
MIGRATE = {URL_VARIABLE, COORDINATOR_URL_VARIABLE}
SECRETS = {
    "DATABASE_URL": "postgresql://u:p@db/leasehold",
    "STORE_URL": "rediss://u@store:6379",
    "COORDINATOR_URL": "postgresql://c:p@db/leasehold",
}
RULES = COMPOSE / "prometheus" / "alerts.yaml"
CASES: Mapping[str, str] = {
    "one region": "agent: {region: eu-west}",
    "coordinators alone": "agent: {enabled: false}\nmigrate: {enabled: false}",
    "agents alone": """
coordinator: {enabled: false}
agent: {region: us-east, coordinatorUrl: "https://coordinator.example.com"}
""",
    "everything": """
image: {repository: registry.example.com/leasehold, tag: 0.1.0}
imagePullSecrets: [{name: registry}]
coordinator:
  settings: {LEASE_MS: 240000, INSTALLATION: production, LOG_LEVEL: debug}
  ingressFrom: [{namespaceSelector: {matchLabels: {team: finance}}}]
  volumes: [{name: ca, configMap: {name: ca}}]
  volumeMounts: [{name: ca, mountPath: /etc/leasehold/ca}]
  nodeSelector: {disk: fast}
agent:
  region: ap-south
  kind: DaemonSet
  grpcPort: 8412
  lameDuckSeconds: 20
  secrets: [COORDINATOR_TOKEN, STORE_URL, STORE_PASSWORD, SERVICE_TOKEN, ADJUST_TOKEN]
  settings: {WORKERS: 2, STORE_CHECK_HOSTNAME: false, JWT_ISSUER: "https://login.example.com", JWT_AUDIENCE: leasehold}
  stateVolume: {hostPath: {path: /var/lib/leasehold, type: DirectoryOrCreate}}
  tolerations: [{operator: Exists}]
monitoring: {enabled: true, labels: {release: prometheus}}
""",
}


@pytest.fixture(scope="session")
def helm() -> Path:
    return part("helm")


@pytest.fixture
def values(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write the values of a case into a file."""
    file = tmp_path / "values.yaml"
    file.write_text(CASES[request.param])
    return file


def with_rules(values: Path) -> list[str | Path]:
    return ["--values", values, "--set-file", f"monitoring.rules={RULES}"]


def manifests_in(text: str) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(text) if each]


def pods_in(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield the component and the specification of each pod."""
    for each in manifests:
        if "template" in each.get("spec", {}):
            template = each["spec"]["template"]
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template["spec"]


@cache
def secret_file(directory: Path, name: str) -> str:
    file = directory / name
    file.write_text(SECRETS.get(name, f"a-secret-of-the-tests-{name.lower().replace('_', '-')}"))
    return str(file)


def require_settings(component: str, environ: Mapping[str, str], secrets: Path) -> None:
    """Load the settings of a service, with files of secrets that exist."""
    given = {name: secret_file(secrets, Path(v).name) if name.endswith(SUFFIX) else v for name, v in environ.items()}
    if component == "migrate":
        assert {name.removesuffix(SUFFIX) for name in environ} <= MIGRATE
        assert all(read_secret(given, name.removesuffix(SUFFIX)) for name in environ)
        return
    cls = CLASSES[component]
    prefix = str(cls.model_config.get("env_prefix"))
    assert all(name.startswith(prefix) for name in given)
    fields = {name.removeprefix(prefix).lower() for name in given}
    assert {name.removesuffix(SUFFIX.lower()) if name not in cls.model_fields else name for name in fields} <= set(
        cls.model_fields
    )
    load_settings(cls, given)


def environment_of(container: Manifest) -> dict[str, str]:
    return {each["name"]: each.get("value", "from the pod") for each in container["env"]}


def require_sound(manifests: list[Manifest], secrets: Path) -> None:
    """Validate manifests against the schemas of Kubernetes and the settings of the services."""
    for manifest in manifests:
        if manifest["kind"] not in OF_THE_PROMETHEUS_OPERATOR:
            for version in KUBERNETES:
                kubernetes_validate.validate(manifest, version, strict=True)
    for component, pod in pods_in(manifests):
        [container] = pod["containers"]
        environ = environment_of(container)
        require_settings(component, environ, secrets)
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        [keys] = [volume["secret"]["items"] for volume in pod["volumes"] if "secret" in volume]
        paths = {f"/etc/leasehold/secrets/{item['path']}" for item in keys}
        assert paths == {value for name, value in environ.items() if name.endswith(SUFFIX)}
        require_hardened(pod, container)
        if component != "migrate":
            require_ports_and_probes(component, container, environ)


def require_hardened(pod: Manifest, container: Manifest) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"USER {pod['securityContext']['runAsUser']}:" in (COMPOSE / "Containerfile").read_text()
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["requests"]
    assert container["resources"]["limits"]["memory"]


def require_ports_and_probes(component: str, container: Manifest, environ: Mapping[str, str]) -> None:
    assert environ[f"LEASEHOLD_{component.upper()}_PORT"] == str(container["ports"][0]["containerPort"])
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}


@pytest.mark.extended
@pytest.mark.parametrize("values", CASES, indirect=True)
def test_the_chart_is_valid_with_these_values(helm: Path, values: Path, tmp_path: Path) -> None:
    linted = [helm / "bin" / "helm", "lint", "--strict", CHART, *with_rules(values)]
    done = subprocess.run(linted, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    require_sound(manifests_in(rendered(helm, *with_rules(values))), tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("values", ["one region", "everything"], indirect=True)
def test_pods_have_the_time_to_leave(helm: Path, values: Path) -> None:
    for component, pod in pods_in(manifests_in(rendered(helm, "--values", values))):
        if component == "agent":
            lame_duck_s = int(environment_of(pod["containers"][0])["LEASEHOLD_AGENT_LAME_DUCK_MS"]) / 1000
            assert pod["terminationGracePeriodSeconds"] >= lame_duck_s + 10


@pytest.mark.extended
@pytest.mark.parametrize(
    ("values", "ports"), [("one region", ["http"]), ("everything", ["http", "grpc"])], indirect=["values"]
)
def test_envoy_reaches_agents_where_the_chart_opens_the_port(helm: Path, values: Path, ports: list[str]) -> None:
    found = manifests_in(rendered(helm, "--values", values))
    [pod] = [pod for component, pod in pods_in(found) if component == "agent"]
    assert [each["name"] for each in pod["containers"][0]["ports"]] == ports
    assert ("LEASEHOLD_AGENT_GRPC_PORT" in environment_of(pod["containers"][0])) == ("grpc" in ports)
    kinds = {each["kind"]: each["spec"] for each in found if each["metadata"]["name"].endswith("-agent")}
    assert [each["targetPort"] for each in kinds["Service"]["ports"]] == ports
    assert [each["port"] for each in kinds["NetworkPolicy"]["ingress"][0]["ports"]] == ports


@pytest.mark.extended
@pytest.mark.parametrize("values", ["everything"], indirect=True)
def test_monitors_find_the_services_and_rules_are_passed_on(helm: Path, values: Path) -> None:
    found = manifests_in(rendered(helm, *with_rules(values)))
    services = [each["metadata"]["labels"].items() for each in found if each["kind"] == "Service"]
    monitors = [each for each in found if each["kind"] == "ServiceMonitor"]
    assert len(monitors) == 2
    for monitor in monitors:
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        assert sum(wanted <= labels for labels in services) == 1
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
    [rules] = [each for each in found if each["kind"] == "PrometheusRule"]
    assert rules["spec"] == yaml.safe_load(RULES.read_text())


@pytest.mark.extended
@pytest.mark.parametrize("values", ["everything"], indirect=True)
def test_services_and_policies_select_the_pods_of_their_component(helm: Path, values: Path) -> None:
    found = manifests_in(rendered(helm, "--values", values))
    pods = [each["spec"]["template"]["metadata"]["labels"].items() for each in found if "template" in each["spec"]]
    for each in found:
        selector = each["spec"].get("podSelector", each["spec"].get("selector", {}))
        labels = selector.get("matchLabels", selector)
        if each["kind"] in ("Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment", "DaemonSet"):
            assert sum(labels.items() <= pod for pod in pods) == 1, each["metadata"]["name"]
    [agents] = [each for each in found if each["kind"] == "DaemonSet"]
    [policy] = [
        each for each in found if each["kind"] == "NetworkPolicy" and each["metadata"]["name"].endswith("coordinator")
    ]
    allowed = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert allowed.items() <= agents["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("agent: {enabled: true}", "agent.region is the name of the region"),
        ("coordinator: {enabled: false}\nagent: {region: a}", "agent.coordinatorUrl is needed"),
        ("agent: {region: a, replica: 3}", "replica"),
        ("agent: {region: a, kind: StatefulSet}", "kind"),
        ("agent: {region: a, settings: {lease_ms: 1}}", "lease_ms"),
    ],
)
def test_values_that_cannot_be_meant_are_refused_by_name(helm: Path, tmp_path: Path, wrong: str, reason: str) -> None:
    (tmp_path / "values.yaml").write_text(wrong)
    with pytest.raises(subprocess.CalledProcessError) as raised:
        rendered(helm, "--values", tmp_path / "values.yaml")
    assert reason in raised.value.stderr


@pytest.mark.extended
def test_the_plain_manifests_are_those_of_the_chart(helm: Path) -> None:
    assert MANIFESTS.read_text() == plain_manifests(helm), "run ./dev manifests"


def test_the_plain_manifests_are_valid(tmp_path: Path) -> None:
    manifests = manifests_in(MANIFESTS.read_text())
    assert {"Job", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= {e["kind"] for e in manifests}
    require_sound(manifests, tmp_path)


# --- systemd ---------------------------------------------------------------------------------------------------------

UNITS = sorted((COMPOSE / "systemd").glob("*.service"))


def assignments(unit: Path, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


def test_there_is_a_unit_for_each_process() -> None:
    assert [unit.stem for unit in UNITS] == ["leasehold-agent", "leasehold-coordinator", "leasehold-migrate"]


@pytest.mark.parametrize("unit", UNITS, ids=[unit.stem for unit in UNITS])
def test_the_settings_accept_the_environment_of_a_unit(unit: Path, tmp_path: Path) -> None:
    component = unit.stem.removeprefix("leasehold-")
    files = [unit.with_name(Path(file.lstrip("-")).name) for file in assignments(unit, "EnvironmentFile")]
    lines = [line for file in files if file.exists() for line in re.findall(r"^\w+=.*$", file.read_text(), re.M)]
    environ = dict(each.split("=", 1) for each in [*assignments(unit, "Environment"), *lines])
    for name, value in environ.items():
        if name.endswith(SUFFIX):
            kinds = {"database-url": "DATABASE_URL", "store-url": "STORE_URL"}
            environ[name] = next((kind for end, kind in kinds.items() if value.endswith(end)), Path(value).name)
    require_settings(component, environ, tmp_path)
    assert assignments(unit, "ExecStart") == [f"/opt/leasehold/bin/leasehold {component}"]


def test_the_agents_unit_has_the_time_to_leave() -> None:
    [agent] = [unit for unit in UNITS if unit.stem == "leasehold-agent"]
    [lame_duck_ms] = [e.split("=")[1] for e in assignments(agent, "Environment") if "LAME_DUCK_MS" in e]
    assert int(assignments(agent, "TimeoutStopSec")[0]) >= int(lame_duck_ms) / 1000 + 10


@pytest.mark.parametrize("unit", UNITS, ids=[unit.stem for unit in UNITS])
def test_systemd_accepts_a_unit_and_finds_it_hardened(unit: Path, tmp_path: Path) -> None:
    analyze = toolchain("systemd-analyze")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/leasehold/bin/leasehold", "/bin/true"))
    verified = subprocess.run([analyze, "verify", copy], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    scored = [analyze, "security", "--offline=true", "--threshold=20", "--no-pager", str(copy)]
    done = subprocess.run(scored, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout.splitlines()[-1]
