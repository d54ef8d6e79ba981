"""Read and write the limits document as people write it: JSON or YAML.

A document is bounded: it is small, has no aliases (which could make it very large), is not nested deeply, and no key
comes twice. Every fault is named with its field and, if it can be found in the text, with line and column. Reading a
large document takes seconds, so it does not run in the event loop.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Annotated, Any, NoReturn, get_args, get_origin

import msgspec
import yaml

from coordinator.limits.rules.validation import DocumentFault, faults_of
from protocol.compatibility.strict import strict
from protocol.counting import counted
from protocol.limits.document import LimitsDocument, Quota, QuotaFields
from web.bodies import decode, invalid
from web.problems import InvalidParameter, Problem

YAML = "application/yaml"
MAX_DOCUMENT_BYTES = 4 * 1024 * 1024  # ten thousand policies, written at length
MAX_EVENTS = 500_000  # of a YAML document, which bounds the time to read it
MAX_DEPTH = 16
MAX_FAULTS = 100
MAX_TEXT = 256


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML with the numbers of version 1.2, and `_` between digits.

    Version 1.1 reads `12:30` as 750, in base sixty, which surprises people and takes time quadratic in the text.

    """


_NUMBERS = {
    "tag:yaml.org,2002:int": (int, re.compile(r"[-+]?[0-9][0-9_]*")),
    "tag:yaml.org,2002:float": (float, re.compile(r"[-+]?(?:[0-9][0-9_]*)?\.?[0-9]+(?:[eE][-+]?[0-9]+)?")),
}


def _number(_: Any, node: yaml.ScalarNode) -> int | float:
    number, pattern = _NUMBERS[node.tag]
    if not pattern.fullmatch(node.value) or len(node.value) > MAX_TEXT:
        raise ValueError(f"a number that cannot be read{_at(node.start_mark)}")
    value: int | float = number(node.value.replace("_", ""))
    return value


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
for _tag, (_, _pattern) in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern.pattern})$"), list("-+.0123456789"))
    _Loader.add_constructor(_tag, _number)

_Dumper: type = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_STRICT = strict(LimitsDocument)
_PATH = re.compile(r"[^.\[\]]+")
_BYTE = re.compile(r"byte (\d{1,9})")


def read_document(body: bytes, media_type: str) -> LimitsDocument:
    """Read a document. Raises the problem that names every fault."""
    if len(body) > MAX_DOCUMENT_BYTES:
        raise Problem("body-too-large", f"a limits document has at most {MAX_DOCUMENT_BYTES} bytes")
    document = _read(body, media_type)
    if faults := [*_unprintable("", msgspec.to_builtins(document)), *faults_of(document)]:
        refuse_document(body, faults)
    return document


def refuse_document(body: bytes, faults: Sequence[DocumentFault]) -> NoReturn:
    """Raise the problem that names for each fault its place in the text."""
    root = _root_of(body)
    found = [
        InvalidParameter(fault.field[:MAX_TEXT], fault.rule, fault.reason[:MAX_TEXT] + _place(root, fault.field))
        for fault in faults[:MAX_FAULTS]
    ]
    more = f"; the first {MAX_FAULTS} are named" if len(faults) > MAX_FAULTS else ""
    detail = f"the document has {counted(len(faults), 'fault')}{more}"
    raise Problem("invalid-request", detail, invalid_parameters=found)


def write_yaml(value: object) -> bytes:
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False)
    return text.encode()


def _read(body: bytes, media_type: str) -> LimitsDocument:
    try:
        written = _from_yaml(body) if media_type == YAML else decode(body, _STRICT)
    except Problem as problem:
        if not problem.invalid_parameters:
            raise _placed(problem, body) from None
        faults = [DocumentFault(*each) for each in problem.invalid_parameters]
        refuse_document(body, _faults_of_shape(body, media_type) or faults)
    return msgspec.convert(msgspec.to_builtins(written), LimitsDocument)


def _placed(problem: Problem, body: bytes) -> Problem:
    """Return the problem of text that is not JSON with line and column in place of the byte offset."""

    def place(found: re.Match[str]) -> str:
        before = body[: int(found[1])].decode(errors="replace")
        return f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}"

    return Problem(problem.kind, _BYTE.sub(place, problem.detail))


def _from_yaml(body: bytes) -> Any:
    try:
        return msgspec.convert(_plain_values(body.decode()), _STRICT)
    except msgspec.ValidationError as error:
        raise invalid(error) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        fault = InvalidParameter("body", "yaml", _sentence(error))
        raise Problem("invalid-request", "the body is not valid YAML", invalid_parameters=[fault]) from None


def _plain_values(text: str) -> object:
    _check_events(text)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ValueError("the document is empty")
        _check_keys(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_events(text: str) -> None:
    """Check the text before a tree is built from it: no aliases, and bounded depth and size."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if count > MAX_EVENTS:
            raise ValueError(f"it has too many values{_at(event.start_mark)}")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ValueError(f"anchors and aliases are not taken{_at(event.start_mark)}")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels{_at(event.start_mark)}")


def _check_keys(node: yaml.Node) -> None:
    for mapping in _mappings(node):
        seen: set[str] = set()
        for key, _ in mapping.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise ValueError(f"a key that is not a name{_at(key.start_mark)}")
            if key.value in seen:
                raise ValueError(f"the key {key.value!r} comes twice{_at(key.start_mark)}")
            seen.add(key.value)


def _mappings(node: yaml.Node) -> Iterator[yaml.MappingNode]:
    if isinstance(node, yaml.MappingNode):
        yield node
        for _, value in node.value:
            yield from _mappings(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _mappings(value)


def _sentence(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        return f"{error.problem}{_at(error.problem_mark)}"
    return str(error).partition("\n")[0]


# --- faults -----------------------------------------------------------------------------------------------------------


def _unprintable(path: str, value: object) -> Iterator[DocumentFault]:
    """Yield texts that no request can match and that the database cannot store."""
    if isinstance(value, str) and not value.isprintable():
        yield DocumentFault(path, "text", "it holds a character that cannot be printed")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _unprintable(f"{path}[{index}]", each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _unprintable(f"{path}.{key!a}".lstrip("."), key)
            yield from _unprintable(f"{path}.{key}".lstrip("."), each)


def _faults_of_shape(body: bytes, media_type: str) -> list[DocumentFault]:
    """Return every unknown field, missing field and wrong type: a decoder stops at the first of them."""
    try:
        plain = _plain_values(body.decode()) if media_type == YAML else msgspec.json.decode(body)
    except (yaml.YAMLError, ValueError, RecursionError):
        return []  # this fault is reported already
    return list(_misshapen(plain, LimitsDocument, ""))


def _misshapen(value: object, type_: Any, path: str) -> Iterator[DocumentFault]:
    """Yield the faults of the innermost values that do not fit their type."""
    try:
        msgspec.convert(value, strict(type_))
    except msgspec.ValidationError as error:
        inner = [fault for part in _parts(value, type_, path) for fault in part]
        problem = invalid(error, path, strict(type_), lambda: deepcopy(value))
        yield from inner or [DocumentFault(*each) for each in problem.invalid_parameters]


def _parts(value: object, type_: Any, path: str) -> Iterator[Iterable[DocumentFault]]:
    plain = get_args(type_)[0] if get_origin(type_) is Annotated else type_
    if isinstance(value, dict) and plain == Quota:
        yield from _parts_of_quota(value, path)
    elif isinstance(value, dict) and isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        yield from _parts_of_struct(value, plain, path)
    elif isinstance(value, list) and get_origin(plain) is list:
        yield from (_misshapen(each, get_args(plain)[0], f"{path}[{index}]") for index, each in enumerate(value))
    elif isinstance(value, dict) and get_origin(plain) is dict:
        yield from (_misshapen(each, get_args(plain)[1], _joined(path, key)) for key, each in value.items())


def _parts_of_quota(value: dict[str, Any], path: str) -> Iterator[Iterable[DocumentFault]]:
    """Yield the faults of a quota as the kind that it names; without one, those of the fields that all kinds have."""
    kinds = {each.kind.value: each for each in get_args(Quota)}
    kind = value.get("kind")
    if kind in kinds:
        yield from _parts_of_struct(value, kinds[kind], path, "kind")
        return
    if "kind" in value:
        yield [DocumentFault(_joined(path, "kind"), "enum", f"{kind!r} is none of {', '.join(kinds)}")]
    else:
        yield [DocumentFault(_joined(path, "kind"), "required", f"it is missing; write {', '.join(kinds)}")]
    of_a_kind = {name for each in kinds.values() for name in each.__struct_fields__} - {*QuotaFields.__struct_fields__}
    common = {name: value[name] for name in value if name not in of_a_kind}
    yield from _parts_of_struct(common, QuotaFields, path, "kind")


def _parts_of_struct(
    value: dict[str, Any], type_: type[msgspec.Struct], path: str, tag: str = ""
) -> Iterator[Iterable[DocumentFault]]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(type_)}
    named = f"a quota of kind {value[tag]!r}" if value.get(tag) else "this object"
    yield [
        DocumentFault(_joined(path, name), "unknown", f"{named} has no field {name!r}")
        for name in value
        if name not in fields and name != tag
    ]
    yield [
        DocumentFault(_joined(path, name), "required", f"{named} needs the field {name!r}")
        for name, field in fields.items()
        if field.required and name not in value
    ]
    yield from (_misshapen(value[name], fields[name].type, _joined(path, name)) for name in fields if name in value)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# --- where in the text ------------------------------------------------------------------------------------------------


def _root_of(body: bytes) -> yaml.Node | None:
    """Return the text as a tree, to find places in it. JSON that is no YAML has no tree, and no places are named."""
    try:
        text = body.decode()
        _check_events(text)
        root: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError):
        return None
    return root


def _place(root: yaml.Node | None, field: str) -> str:
    """Return the place of the field, or of the nearest enclosing one if it is missing."""
    node = root
    for step in _PATH.findall(field):
        inner = _step(node, step)
        if inner is None:
            break
        node = inner
    return "" if node is None else _at(node.start_mark)


def _step(node: yaml.Node | None, step: str) -> yaml.Node | None:
    if isinstance(node, yaml.SequenceNode) and step.isdigit() and int(step) < len(node.value):
        found: yaml.Node = node.value[int(step)]
        return found
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == step), None)
    return None


def _at(mark: Any) -> str:
    return f" (line {mark.line + 1}, column {mark.column + 1})"
