"""Write the reference pages of the documentation from the code, while mkdocs builds the site.

The pages are not checked in, so they cannot be out of date: settings come from the settings classes, metrics from
`/metrics` of both services, problem types from their table, commands from the command line itself, and the HTTP API
from the checked-in OpenAPI documents. mkdocs calls `on_files` because mkdocs.yml names this file as a hook.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from coordinator.metrics import CoordinatorMetrics
from coordinator.settings import CoordinatorSettings
from leasehold.doctor.catalogue import CATALOGUE
from protocol.problems import PROBLEMS
from regional_agent.envoy.door.metrics import GrpcMetrics
from regional_agent.main import create_app as create_agent
from regional_agent.settings import AgentSettings
from web.connections import ConnectionLimits
from web.credentials.jwt_metrics import JwtMetrics
from web.credentials.jwt_settings import JwtSettings
from web.credentials.secret_files import SUFFIX
from web.declared_metrics import declared_labels
from web.metrics import HttpMetrics
from web.settings import Settings, is_read_again, is_secret, variable_of
from web.tls.certificates import Certificates
from web.tls.handshakes import FailedHandshakes

OPENAPI = Path(__file__).parent / "openapi"
PICTURES = Path(__file__).parents[1] / "benchmarks" / "results"
SERVICES: Mapping[str, type[Settings]] = {"agent": AgentSettings, "coordinator": CoordinatorSettings}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those that mkdocs found in docs/."""
    for name, page in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=page))
    for picture in sorted(PICTURES.glob("*.svg")):
        files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Point to the copies of the pictures that benchmarks leave outside of docs/."""
    return markdown.replace("](../benchmarks/results/", "](pictures/")


def pages() -> dict[str, str]:
    """Return the generated pages, by name."""
    return {
        "settings": settings_page(),
        "metrics": metrics_page(),
        "errors": errors_page(),
        "checks": checks_page(),
        "cli": cli_page(),
        **{f"{service}-api": api_page(service) for service in SERVICES},
    }


def settings_page() -> str:
    """Return the environment variables of both services, from their settings classes."""
    lines = [
        "# Settings",
        "",
        "Both services read their settings from environment variables when they start. An empty variable counts as"
        " not set. If a value is missing or invalid, the service prints the variable's name, what is wrong with it"
        " and an example, and exits. Each secret may be [in a file](../guides/security.md#secrets-in-files-_file).",
    ]
    for service, cls in SERVICES.items():
        lines += ["", f"## {service.capitalize()}", "", "| variable | default | meaning |", "| --- | --- | --- |"]
        own_first = sorted(cls.model_fields.items(), key=lambda each: each[0] in JwtSettings.model_fields)
        lines += [_setting(cls, name, field) for name, field in own_first]
    return "\n".join(lines) + "\n"


def _setting(cls: type[Settings], name: str, field: FieldInfo) -> str:
    example = field.examples[0] if field.examples else ""
    if field.is_required():
        default = f"required, for example `{example}`"
    elif field.default is PydanticUndefined or field.default in (None, ""):
        default = "not set"
    else:
        default = f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"
    variable = variable_of(cls, name)
    secret = f" {_secret(variable, field)}" if is_secret(field) else ""
    return f"| `{variable}` | {default} | {field.description or ''}{secret} |"


def _secret(variable: str, field: FieldInfo) -> str:
    when = "read again when it changes" if is_read_again(field) else "read at the start only"
    return f"Secret: never shown in logs. `{variable}{SUFFIX}` names a file that has it instead, {when}."


def metrics_page() -> str:
    """Return the metrics of both services, as their own `/metrics` describes them."""
    lines = [
        "# Metrics",
        "",
        "Both services expose Prometheus metrics at `/metrics`."
        " [Health and faults](../guides/health.md#metrics) says which answer which question.",
    ]
    for service, registry in _registries().items():
        lines += [
            "",
            f"## {service.capitalize()}",
            "",
            "| metric | type | labels | meaning |",
            "| --- | --- | --- | --- |",
        ]
        lines += sorted(_metrics(registry))
    return "\n".join(lines) + "\n"


def _registries() -> dict[str, CollectorRegistry]:
    """Return what both services count, from services that are made and never started."""
    agent = create_agent(
        AgentSettings(
            region="nowhere",
            coordinator_url="http://localhost",
            coordinator_token=SecretStr("none"),
            store_url=SecretStr("redis://localhost"),
        )
    )
    coordinator = CoordinatorMetrics().registry
    HttpMetrics(coordinator)
    ConnectionLimits(registry=coordinator)
    JwtMetrics(coordinator)
    JwtMetrics(agent.state.region.metrics.registry)
    GrpcMetrics(agent.state.region.metrics.registry)
    FailedHandshakes(coordinator)
    Certificates({}, coordinator)
    return {"agent": agent.state.region.metrics.registry, "coordinator": coordinator}


def _metrics(registry: CollectorRegistry) -> Iterator[str]:
    declared = declared_labels()
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        kind = "gauge" if family.type == "stateset" else family.type
        sampled = {label: None for sample in family.samples for label in sample.labels if label != "le"}
        known = declared.get(family.name) or sampled or getattr(family, "_labelnames", None) or ()
        labels = ", ".join(f"`{label}`" for label in known)
        yield f"| `{name}` | {kind} | {labels} | {family.documentation.rstrip('.')}. |"


def errors_page() -> str:
    """Return every kind of problem document, from the table that the services answer with."""
    lines = [
        "# Errors",
        "",
        "Every error is a problem document ([RFC 9457](https://www.rfc-editor.org/rfc/rfc9457)) with the media type"
        " `application/problem+json`. Branch on `type`, which is `/problems/` and the name below; show `detail` to"
        " people; send `request_id` when you ask for help, because the service's log has it too. An error about the"
        " content of a request lists each fault in `invalid_parameters` with `field`, `rule` and `reason`.",
        "",
        "| type | status | title | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for name, kind in sorted(PROBLEMS.items(), key=lambda item: (item[1].status, item[0])):
        lines.append(f"| <a id='{name}'></a>`{name}` | {kind.status} | {kind.title} | {kind.explanation} |")
    return "\n".join(lines) + "\n"


def checks_page() -> str:
    """Return every check of the doctor and of the services, from the list that they run."""
    lines = [
        "# Checks",
        "",
        "`leasehold doctor` runs these checks, and each service runs its own when it starts and every five minutes:"
        " a problem is logged (`check found a problem`) with the same code when it begins, and `check ok again`"
        " when it is over. The codes are stable. An agent shows its results in `/v1/status`, a coordinator at"
        " `GET /v1/diagnosis`. See [the production checklist](../guides/production.md) for what to run when.",
    ]
    for group, checks in CATALOGUE.items():
        lines += ["", f"## {group}", "", "| check | examines | warns if | fails if | what to do |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        lines += [
            f"| <a id='{each.code}'></a>`{each.code}` | {each.examines} | {each.warns or 'never'} |"
            f" {each.fails or 'never'} | {each.remedy} |"
            for each in checks
        ]
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """Return the help of every command, as typer writes it."""
    command = [sys.executable, "-m", "typer", "leasehold.cli.app", "utils", "docs", "--name", "leasehold"]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    title = (
        "# Command line\n\nCommands that call a coordinator read its address from `LEASEHOLD_URL` and a token from"
        " `LEASEHOLD_TOKEN`. Commands that work on the database (`migrate`, `token`, and `verify"
        " --database`) read `LEASEHOLD_MIGRATE_DATABASE_URL`. Each of these secrets may be in a file that a variable"
        " with `_FILE` at its end names, such as `LEASEHOLD_TOKEN_FILE`. `leasehold env` prints the variables of a"
        " running `leasehold up`.\n"
    )
    return title + written.partition("\n")[2]


def api_page(service: str) -> str:
    """Return the operations of one service, from its checked-in OpenAPI document."""
    document = json.loads((OPENAPI / f"{service}.json").read_text(encoding="utf-8"))
    lines = [
        f"# {service.capitalize()} API",
        "",
        "The exact request and response bodies are in the OpenAPI document"
        f" [{service}.json](../openapi/{service}.json). Every error is a [problem document](errors.md).",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += ["", f"## `{method.upper()} {path}`", "", *_operation(operation)]
    return "\n".join(lines) + "\n"


def _operation(operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"**{operation['summary']}.** {operation.get('description', '')}"
    if operation.get("parameters"):
        yield from ("", "| parameter | in | meaning |", "| --- | --- | --- |")
    for parameter in operation.get("parameters", []):
        needed = "required. " if parameter.get("required") else ""
        yield f"| `{parameter['name']}` | {parameter['in']} | {needed}{parameter.get('description', '')} |"
    yield ""
    yield "Answers: " + ", ".join(f"{status}" for status in operation["responses"]) + "."
