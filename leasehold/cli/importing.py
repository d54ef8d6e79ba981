"""`leasehold import`: turn the configuration of another rate limiter into a limits document."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leasehold.cli.api import read_input
from leasehold.cli.output import fail, warn

if TYPE_CHECKING:
    from leasehold.importers.imported import Imported

commands = typer.Typer(no_args_is_help=True, help="Turn the configuration of another rate limiter into a document.")

AsJson = Annotated[bool, typer.Option("--json", help="Print the document and what has no equal, for programs.")]
InShadow = Annotated[bool, typer.Option("--shadow", help="Put all policies in shadow: they count, and deny nothing.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="A file to write.", show_default="standard output")]


@commands.command(name="envoy-ratelimit")
def import_envoy_ratelimit(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="The files of its configuration, YAML.")],
    output: Output = None,
    as_json: AsJson = False,
    shadow: InShadow = False,
) -> None:
    """Import the configuration of envoyproxy/ratelimit.

    What has no equal is printed to standard error with its reason, and is a comment of the document.
    """
    from leasehold.importers.envoy_ratelimit import import_configurations

    contents = {str(file): _read_yaml(file) for file in files}
    _write(lambda: import_configurations(contents), output, as_json=as_json, shadow=shadow)


@commands.command(name="limitador")
def import_limitador(
    file: Annotated[Path, typer.Argument(help="The limits, YAML.")],
    output: Output = None,
    as_json: AsJson = False,
    shadow: InShadow = False,
) -> None:
    """Import the limits of Limitador.

    What has no equal is printed to standard error with its reason, and is a comment of the document.
    """
    from leasehold.importers.limitador import import_limits

    content = _read_yaml(file)
    _write(lambda: import_limits(str(file), content), output, as_json=as_json, shadow=shadow)


def _read_yaml(file: Path) -> object:
    import yaml

    try:
        content: object = yaml.safe_load(read_input(file))
    except yaml.YAMLError as error:
        fail(f"{file}: {error}")
    return content


def _write(make: "Callable[[], Imported]", output: Path | None, *, as_json: bool, shadow: bool) -> None:
    from coordinator.limits.document import YAML, read_document, write_yaml
    from leasehold.importers.imported import InvalidConfiguration
    from web.problems import Problem

    try:
        imported = make()
    except InvalidConfiguration as error:
        fail(str(error))
    if shadow:
        imported.put_in_shadow()
    body = write_yaml(imported.document)
    try:
        read_document(body, YAML)
    except Problem as problem:
        faults = "; ".join(f"{each.field}: {each.reason}" for each in problem.invalid_parameters or [])
        fail(f"the result is no valid limits document: {problem.detail} {faults}")
    text = "".join(f"# no equal: {note}\n" for note in imported.notes) + body.decode()
    if as_json:
        text = json.dumps({"document": imported.document, "no_equal": imported.notes}) + "\n"
    for note in imported.notes:
        warn(f"no equal: {note}")
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
