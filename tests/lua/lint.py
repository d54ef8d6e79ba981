"""A linter for the scripts in lua/: `./dev check lua`, or `python -m tests.lua.lint FILE ...`.

It reports what luacheck reports of such scripts, and needs only packages that pip can install; luacheck has none. Two
parsers read each file. The interpreter of Lua 5.1, which is what Redis and Valkey run, refuses wrong syntax.
tree-sitter gives the tree in which names are looked up.
"""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path

import tree_sitter_lua
from lupa import lua51  # type: ignore[import-untyped]  # it has no types
from tree_sitter import Language, Node, Parser

ROOT = Path(__file__).parents[2]
MAX_COLUMNS = 120

# Globals of scripts in Redis and Valkey: Lua 5.1 without access to the system, and the first two lines. `require` is
# ours: regional_agent/store joins the files of lua/ before it sends them. Nothing may be assigned to any of these.
GLOBALS = {
    *("redis", "server", "cjson", "cmsgpack", "struct", "bit", "KEYS", "ARGV", "require"),
    *("assert", "error", "ipairs", "next", "pairs", "pcall", "select", "tonumber", "tostring", "type", "unpack"),
    *("math", "string", "table"),
}
LIBRARIES = ("math", "string", "table")  # whose fields the interpreter here knows


@dataclass
class Variable:
    """A local variable, an argument or a loop variable, and where it is used."""

    name: str
    kind: str
    node: Node
    owner: Node  # the declaration: what a local function reads of itself inside it does not count
    is_new_table: bool = False  # so that assignments to its fields alone are no use of it
    reads: list[Node] = field(default_factory=list)
    is_assigned: bool = False

    def complaint(self) -> str | None:
        if self.name == "_" or any(not _is_inside(read, self.owner) for read in self.reads):
            return None
        if self.is_assigned:
            return f"{self.kind} '{self.name}' is assigned but never read"
        return f"{self.kind} '{self.name}' is never used"


class Linter:
    """One walk over a file's syntax tree, with a stack of scopes; `findings` are lines and what is wrong in them."""

    def __init__(self) -> None:
        self.findings: list[tuple[int, str]] = []
        self._scopes: list[dict[str, Variable]] = []

    def visit(self, node: Node) -> None:
        visit = getattr(self, f"_visit_{node.type}", None)
        if visit is not None:
            visit(node)
        else:
            self._visit_all(node.named_children)

    def block(self, node: Node | None, *arguments: tuple[Node, str], condition: Node | None = None) -> None:
        """Visit a block in a scope of its own; `condition` is that of a repeat, which sees the block's variables."""
        self._scopes.append({})
        for name, kind in arguments:
            self._declare(name, kind, owner=name)
        if node is not None:
            self._visit_statements(node)
        if condition is not None:
            self.visit(condition)
        for variable in self._scopes.pop().values():
            if complaint := variable.complaint():
                self._report(variable.node, complaint)

    def _visit_statements(self, node: Node) -> None:
        has_ended = False
        for statement in node.named_children:
            if statement.type == "comment":
                continue
            if has_ended:
                self._report(statement, "unreachable code")
            has_ended = _always_leaves(statement)
            self.visit(statement)

    def _visit_all(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self.visit(node)

    # Declarations

    def _visit_variable_declaration(self, node: Node) -> None:
        names, values = _sides(node.named_children[0])
        self._visit_all(values)
        if values:
            self._compare_lengths(node, names, values)
        for name, value in zip_longest(names, values[: len(names)]):
            is_new_table = value is not None and value.type == "table_constructor"
            self._declare(name, "variable", owner=name, is_new_table=is_new_table)

    def _visit_function_declaration(self, node: Node) -> None:
        name = _child(node, "name")
        if node.children[0].type == "local":
            self._declare(name, "function", owner=node)
        elif name.type == "identifier":
            self._assign(name)
        else:
            self.visit(name)
        self._visit_function_definition(node)

    def _visit_function_definition(self, node: Node) -> None:
        parameters = _child(node, "parameters").children_by_field_name("name")
        names = [(name, "argument") for name in parameters]
        self.block(node.child_by_field_name("body"), *names)

    def _declare(self, name: Node, kind: str, owner: Node, is_new_table: bool = False) -> None:
        text = _text(name)
        earlier = self._find(text)
        if earlier is not None and text != "_":
            self._report(name, f"{kind} '{text}' shadows the {earlier.kind} of line {_line(earlier.node)}")
        if earlier is not None and text in self._scopes[-1] and (complaint := earlier.complaint()):
            self._report(earlier.node, complaint)
        self._scopes[-1][text] = Variable(text, kind, name, owner, is_new_table)

    # Statements

    def _visit_assignment_statement(self, node: Node) -> None:
        targets, values = _sides(node)
        self._visit_all(values)
        self._compare_lengths(node, targets, values)
        for target in targets:
            if target.type == "identifier":
                self._assign(target)
            else:
                self._assign_field(target)

    def _assign(self, name: Node) -> None:
        text = _text(name)
        if variable := self._find(text):
            variable.is_assigned = True
        else:
            self._report(name, f"assignment to the global '{text}'")

    def _assign_field(self, target: Node) -> None:
        table = _child(target, "table")
        variable = self._find(_text(table))
        if variable is not None and variable.is_new_table:
            variable.is_assigned = True
            if target.type == "bracket_index_expression":
                self.visit(_child(target, "field"))
        elif variable is None and _text(table) in GLOBALS:
            self._report(target, f"assignment to a field of the global '{_text(table)}'")
        else:
            self.visit(target)

    def _compare_lengths(self, node: Node, targets: Sequence[Node], values: Sequence[Node]) -> None:
        is_open = values[-1].type in ("function_call", "vararg_expression")
        if len(values) > len(targets) or (len(values) < len(targets) and not is_open):
            self._report(node, f"{len(targets)} variables and {len(values)} values in an assignment")

    def _visit_do_statement(self, node: Node) -> None:
        self._visit_branch(node, "body")

    def _visit_while_statement(self, node: Node) -> None:
        self.visit(_child(node, "condition"))
        self.block(node.child_by_field_name("body"))

    def _visit_repeat_statement(self, node: Node) -> None:
        self.block(node.child_by_field_name("body"), condition=_child(node, "condition"))

    def _visit_if_statement(self, node: Node) -> None:
        self.visit(_child(node, "condition"))
        self._visit_branch(node, "consequence")
        self._visit_all(node.children_by_field_name("alternative"))

    _visit_elseif_statement = _visit_if_statement

    def _visit_else_statement(self, node: Node) -> None:
        self._visit_branch(node, "body")

    def _visit_branch(self, node: Node, name: str) -> None:
        body = node.child_by_field_name(name)
        if body is None or all(child.type == "comment" for child in body.named_children):
            self._report(node, "empty block")
        self.block(body)

    def _visit_for_statement(self, node: Node) -> None:
        clause = _child(node, "clause")
        if clause.type == "for_generic_clause":
            names, values = _sides(clause)
        else:
            names = [_child(clause, "name")]
            values = [child for child in clause.named_children if child != names[0]]
        self._visit_all(values)
        self.block(node.child_by_field_name("body"), *((name, "loop variable") for name in names))

    # Expressions

    def _visit_identifier(self, node: Node) -> None:
        text = _text(node)
        if variable := self._find(text):
            variable.reads.append(node)
        elif text not in GLOBALS:
            self._report(node, f"undefined global '{text}'")

    def _visit_dot_index_expression(self, node: Node) -> None:
        table, name = _child(node, "table"), _text(_child(node, "field"))
        self.visit(table)
        library = _text(table)
        if library in LIBRARIES and self._find(library) is None and name not in _fields(library):
            self._report(node, f"undefined field '{library}.{name}'")

    def _visit_method_index_expression(self, node: Node) -> None:
        self.visit(_child(node, "table"))

    def _visit_table_constructor(self, node: Node) -> None:
        self._visit_all(node.named_children)
        names = Counter(_text(_child(each, "name")) for each in node.named_children if _is_named_field(each))
        for name, count in names.items():
            if count > 1:
                self._report(node, f"field '{name}' is given {count} times")

    def _visit_field(self, node: Node) -> None:
        if not _is_named_field(node) and (key := node.child_by_field_name("name")):
            self.visit(key)
        self.visit(_child(node, "value"))

    # Names

    def _find(self, name: str) -> Variable | None:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), None)

    def _report(self, node: Node, what: str) -> None:
        self.findings.append((_line(node), what))


def findings(text: str) -> list[tuple[int, str]]:
    """Return what is wrong with a script: lines, and what in them, in the order of lines."""
    long = [
        (number, f"line of {len(line)} characters")
        for number, line in enumerate(text.splitlines(), start=1)
        if len(line) > MAX_COLUMNS
    ]
    try:
        lua51.LuaRuntime().compile(text)
    except lua51.LuaSyntaxError as error:
        return [*long, (int((re.findall(r":(\d+):", str(error)) or ["1"])[0]), str(error))]
    linter = Linter()
    tree = Parser(Language(tree_sitter_lua.language())).parse(text.encode())
    linter.block(tree.root_node)
    return sorted(long + linter.findings)


def _sides(node: Node) -> tuple[list[Node], list[Node]]:
    """Return the names and the values of a declaration, an assignment or a generic for."""
    lists = [node] if node.type == "variable_list" else node.named_children
    by_type = {each.type: [child for child in each.named_children if child.type != "attribute"] for each in lists}
    return by_type["variable_list"], by_type.get("expression_list", [])


def _always_leaves(node: Node) -> bool:
    """Return whether no statement after this one is ever reached."""
    if node.type in ("return_statement", "break_statement"):
        return True
    if node.type == "do_statement":
        return _block_always_leaves(node.child_by_field_name("body"))
    if node.type == "if_statement":
        alternatives = node.children_by_field_name("alternative")
        if not alternatives or alternatives[-1].type != "else_statement":
            return False
        branches = [each.child_by_field_name("consequence") for each in (node, *alternatives[:-1])]
        return all(map(_block_always_leaves, [*branches, alternatives[-1].child_by_field_name("body")]))
    return False


def _block_always_leaves(block: Node | None) -> bool:
    statements = [each for each in block.named_children if each.type != "comment"] if block is not None else []
    return bool(statements) and _always_leaves(statements[-1])


def _is_named_field(node: Node) -> bool:
    """Return whether a field of a table is `name = value`, not `[key] = value` or a value alone."""
    return (
        node.type == "field" and node.children[0].type == "identifier" and node.child_by_field_name("name") is not None
    )


@cache
def _fields(library: str) -> frozenset[str]:
    return frozenset(lua51.LuaRuntime().globals()[library])


def _child(node: Node, name: str) -> Node:
    child = node.child_by_field_name(name)
    assert child is not None, f"{node.type} has no {name}"
    return child


def _text(node: Node) -> str:
    return (node.text or b"").decode()


def _line(node: Node) -> int:
    return node.start_point.row + 1


def _is_inside(node: Node, outer: Node) -> bool:
    return outer.start_byte <= node.start_byte < outer.end_byte


def main(arguments: Sequence[str]) -> int:
    """Print the findings of the files named, or of all in lua/, and return 1 if there are any."""
    paths = [Path(each) for each in arguments] or sorted((ROOT / "lua").rglob("*.lua"))
    found = [f"{path}:{line}: {what}" for path in paths for line, what in findings(path.read_text(encoding="utf-8"))]
    print("\n".join([*found, f"{len(found)} findings in {len(paths)} files"]))  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
