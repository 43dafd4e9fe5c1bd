"""Mutants of a module: small changes of its syntax, each of which some test ought to notice.

Not mutated: annotations, decorators, texts, log calls, bodies of protocols, and what only type checkers read.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_LONGEST = 90
_SMALL = 16

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """In `path`, `after` stands in place of `before`. `scope` is the qualified name of function or class.

    `number` tells equal changes of a scope apart. The key stays the same when lines move.
    """

    path: str
    scope: str
    in_function: bool
    before: str
    after: str
    number: int
    node: ast.stmt | ast.expr
    replacement: ast.stmt | ast.expr

    @property
    def key(self) -> str:
        number = f" #{self.number}" if self.number else ""
        return f"{self.path} {self.scope or '-'}: {_short(self.before)} -> {_short(self.after)}{number}"

    def source(self, text: str) -> str:
        """Return `text`, the module's, with the change."""
        lines = text.encode().splitlines(keepends=True)
        offsets = [0]
        for line in lines:
            offsets.append(offsets[-1] + len(line))
        node, whole = self.node, b"".join(lines)
        end = offsets[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        start = offsets[node.lineno - 1] + node.col_offset
        after = self.after if isinstance(node, ast.stmt) else f"({self.after})"
        return (whole[:start] + after.encode() + whole[end:]).decode()


def mutants_of(root: Path, path: str) -> list[Mutant]:
    tree = ast.parse((root / path).read_text())
    seen: Counter[tuple[str, str, str]] = Counter()
    found = []
    for scope, in_function, node, replacement in _walk(tree, "", in_function=False):
        before, after = ast.unparse(node), ast.unparse(replacement)
        change = (scope, _short(before), _short(after))
        found.append(Mutant(path, scope, in_function, before, after, seen[change], node, replacement))
        seen[change] += 1
    return found


_Node = TypeVar("_Node", ast.stmt, ast.expr)
_Found = tuple[str, bool, "ast.stmt | ast.expr", "ast.stmt | ast.expr"]


def _walk(node: ast.AST, scope: str, *, in_function: bool) -> Iterator[_Found]:
    for child in _mutated_children(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            is_function = not isinstance(child, ast.ClassDef)
            inner = f"{scope}{'.<locals>' * in_function}.{child.name}".lstrip(".")
            yield from _walk(child, inner, in_function=is_function)
            continue
        if isinstance(child, ast.stmt | ast.expr):
            for replacement in _replacements(child, node):
                yield scope, in_function, child, replacement
        yield from _walk(child, scope, in_function=in_function)


def _mutated_children(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "bases", "keywords"} and not (
            isinstance(node, ast.Call)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_alone(child):
                yield child


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return True
        case ast.ClassDef(bases=bases):
            return any(ast.unparse(base).partition("[")[0] == "Protocol" for base in bases)
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="_log")))):
            return True
    return False


def _replacements(node: ast.stmt | ast.expr, parent: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    """Yield what may stand in place of `node`."""
    if isinstance(node, ast.stmt):
        yield from _statements(node)
        return
    yield from _expressions(node)
    if isinstance(node, ast.Name | ast.Attribute | ast.Call) and _is_test(node, parent):
        yield ast.UnaryOp(ast.Not(), node)


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                yield _with(node, "ops", [*ops[:at], _SWAPS[type(op)](), *ops[at + 1 :]])
        case ast.BoolOp(op=op):
            yield _with(node, "op", _SWAPS[type(op)]())
        case ast.BinOp(op=op, left=left) if type(op) in _SWAPS and not _is_text(left):
            yield _with(node, "op", _SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1 if abs(value) <= _SMALL else 2 * value)


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    match node:
        case ast.Return(value=ast.expr() as value) if not _is_falsy(value):
            yield ast.Return(ast.Constant(None))
        case ast.AugAssign(op=op):
            yield ast.Pass()
            if type(op) in _SWAPS:
                yield _with(node, "op", _SWAPS[type(op)]())
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Continue() | ast.Break():
            yield ast.Pass()


def _with(node: _Node, name: str, value: object) -> _Node:
    changed = copy.copy(node)
    setattr(changed, name, value)
    return changed


def _is_test(node: ast.expr, parent: ast.AST) -> bool:
    return isinstance(parent, ast.If | ast.While | ast.IfExp) and parent.test is node


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _is_falsy(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
