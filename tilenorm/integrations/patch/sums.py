"""Sums of a block that a norm follows: one call computes both, where the sum stands.

    x = a + b                   x, normed = one_pass(self.norm, (a, b))
    y = self.mlp(self.norm(x))  y = self.mlp(self.norm(x) if normed is None else normed)

    x = self.norm(a + b)        x = one_pass(self.norm, (a, b))[1]

No code of others may run between a sum and its norm. Names, constants, copies, and attributes that
the block's class does not compute may stand there. So may an `if`, whose test is asked once more
where the sum stands: it chooses the norm. What cannot be computed in one pass is computed as before
and where it stood before: `normed` is None then.

A patched norm's class has a function for such sums, which compares and calls in one frame. So
`one_pass` is in truth `getattr(norm.__class__, SUM, self.one_pass)`.
"""

import ast
from dataclasses import dataclass
from typing import Any, NamedTuple

from .forwards import SUM
from .rewriter import GETATTR, NORM, ONE_PASS, Rewriter, names_in, reads_plainly

TERMS, NORMED = "_tilenorm_terms", "_tilenorm_normed"  # local variables
IS_PLAIN = "_tilenorm_is_plain"  # a method of a rewritten class
FUNCTION = f"{{this}}.{GETATTR}({NORM}.__class__, {SUM!r}, {{this}}.{ONE_PASS})"
SUM_AND_NORM = f"""\
{TERMS} = ()
{NORM} = None
{{x}}, {NORMED} = {FUNCTION}({NORM}, {TERMS})
del {TERMS}
"""
# What is evaluated in the order of its fields, and whose parts are all evaluated.
IN_ORDER = (ast.BinOp, ast.UnaryOp, ast.Call, ast.keyword, ast.Subscript, ast.Attribute)
IN_ORDER += (ast.Starred, ast.Tuple, ast.List)
NOT_EVALUATED = (ast.operator, ast.unaryop, ast.expr_context)
TRUTHS = (bool, type(None), int, float, str, tuple, list, dict)


def is_plain(value: object) -> bool:
    """Whether an `if` runs no code of others to learn the truth of a value."""
    cls = type(value)
    return cls in TRUTHS or not (hasattr(cls, "__bool__") or hasattr(cls, "__len__"))


@dataclass(eq=False)
class _Way:
    """A way that a forward goes behind a sum: to a norm, to two more ways by a test, or to neither.
    by_group: the scale and shift of the norm, if it is modulated.
    """

    norm: ast.Attribute | None = None
    by_group: tuple[ast.expr, ...] = ()
    test: ast.expr | None = None
    ways: tuple = ()


class _Behind(NamedTuple):
    """A place of a forward that is reached right behind sums only, which are assigned to x.

    ways: those that lead here; none if no statement leads here. changed: the variables that were
    assigned since, x among them.
    """

    x: str
    ways: tuple[_Way, ...]
    changed: frozenset[str]


_UNREACHED = _Behind("", (), frozenset())


class Sums(Rewriter):
    """Rewrites each `x = a + b` with a `self.norm(x)` behind it, and each `self.norm(a + b)`."""

    absent = "sum right before"

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        super().generic_visit(node)
        self.sums: dict[ast.stmt, _Way] = {}
        self.places: dict[ast.expr, ast.expr] = {}
        self._follow(node.body, None)
        new: dict[Any, Any] = {total: self._lines(total, way) for total, way in self.sums.items()}
        return _Replacing({**new, **self.places}).visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        """Python assigns to no variable in what a comprehension iterates over."""
        before, self.assigns = self.assigns, False
        self.generic_visit(node)
        self.assigns = before
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(norm, [ast.BinOp(a, ast.Add(), b)], []) if self._is_norm(norm):
                return self._normed(node, norm, [a, b], [])
        return node

    def _follow(self, statements: list[ast.stmt], behind: _Behind | None) -> _Behind | None:
        """Notes the sums and norms of statements. Returns what the place behind them is.
        behind: what the place before them is. None: others lead to a place too, or code runs.
        """
        for statement in statements:
            behind = self._behind(statement, behind)
        return behind

    def _behind(self, statement: ast.stmt, behind: _Behind | None) -> _Behind | None:
        match statement:
            case ast.If(test, body, orelse):
                first, second = self._by(test, behind) if behind else (None, None)
                return _merged(self._follow(body, first), self._follow(orelse, second))
            case ast.For(body=body) | ast.While(body=body) | ast.With(body=body):
                self._follow(body, None)
                self._follow(getattr(statement, "orelse", []), None)
                return None
            case ast.Pass() | ast.Expr(ast.Constant()):
                return behind
            case ast.Assign([ast.Name(name)], value) if (
                behind and self._is_load(value) and name not in (behind.x, self.this)
            ):
                return behind._replace(changed=behind.changed | {name})
        if behind:
            self._take(statement, behind)
        match statement:
            case ast.Return() | ast.Raise() | ast.Continue() | ast.Break():
                return _UNREACHED
            case ast.Assign([ast.Name(x)], ast.BinOp(op=ast.Add())) if x != self.this:
                way = self.sums[statement] = _Way()
                return _Behind(x, (way,), frozenset([x]))
        return None

    def _by(self, test: ast.expr, behind: _Behind) -> tuple[_Behind | None, _Behind | None]:
        """The two places behind a test, if asking it where the sum stands gives the same."""
        if not self._is_test(test) or any(names_in([test], name) for name in behind.changed):
            return None, None
        for way in behind.ways:
            way.test, way.ways = test, (_Way(), _Way())
        first, second = (
            behind._replace(ways=tuple(way.ways[n] for way in behind.ways)) for n in (0, 1)
        )
        return first, second

    def _is_test(self, test: ast.expr) -> bool:
        """Whether no code runs for a test, if the value of `_asked` is plain."""
        match test:
            case ast.Compare(left, [ast.Is() | ast.IsNot()], [right]):
                return self._is_load(left) and self._is_load(right)
            case ast.UnaryOp(ast.Not(), inner):
                return self._is_test(inner)
            case ast.BoolOp(values=values):
                return all(self._is_test(v) and _asked(v) is None for v in values)
        return self._is_load(test)

    def _is_load(self, node: ast.AST) -> bool:
        match node:
            case ast.Name() | ast.Constant():
                return True
            case ast.Attribute(ast.Name(this), name):
                return this == self.this and reads_plainly(self.cls, name)
            case ast.Tuple(parts) | ast.List(parts):
                return all(map(self._is_load, parts))
        return isinstance(node, NOT_EVALUATED)

    def _take(self, statement: ast.stmt, behind: _Behind) -> None:
        """Notes the norm of x in a statement, if only loads are evaluated before it."""
        match statement:
            case ast.AugAssign(target=ast.Name()) | ast.AnnAssign(target=ast.Name()):
                node: Any = statement.value
            case ast.Assign() | ast.Return() | ast.Expr():
                node = statement.value
            case _:
                return
        match node:
            case ast.Subscript(
                ast.Call(ast.Attribute(attr=attr), [norm, ast.Tuple([ast.Name(x)]), *by_group])
            ) if attr == ONE_PASS and x == behind.x and not names_in(by_group, x):
                if behind.changed == {x} and behind.ways[0] in self.sums.values():
                    behind.ways[0].norm, behind.ways[0].by_group = norm, tuple(by_group)
                    self.places[node] = ast.Name(NORMED, ast.Load())
                return
        while isinstance(node, IN_ORDER):
            match node:
                case ast.Call(norm, [ast.Name(x)], []) if x == behind.x and (
                    self._is_norm(norm) and self._is_load(norm)
                ):
                    for way in behind.ways:
                        way.norm = norm
                    normed = ast.Name(NORMED, ast.Load())
                    absent = ast.Compare(normed, [ast.Is()], [ast.Constant(None)])
                    self.places[node] = ast.copy_location(ast.IfExp(absent, node, normed), node)
                    return
            parts = ast.iter_child_nodes(node)
            node = next((part for part in parts if not self._is_load(part)), None)

    def _lines(self, total: Any, way: _Way) -> list[ast.stmt] | None:
        """In the place of a sum: the sum, and its norm if one pass computes both; None if no norm
        is behind it.
        """
        norm = self._chosen(way)
        if isinstance(norm, ast.Constant):
            return None
        text = SUM_AND_NORM.format(x=total.targets[0].id, this=self.this)
        lines: Any = ast.parse(text).body
        for line in lines:
            for node in ast.walk(line):
                ast.copy_location(node, total)
        call = lines[2].value
        if way.by_group:
            call.func = call.func.args[2]
            call.args += way.by_group
        else:
            call.keywords = [ast.keyword("defers", ast.Constant(True))]
        lines[0].value = ast.Tuple([total.value.left, total.value.right], ast.Load())
        lines[1].value = norm
        return lines

    def _chosen(self, way: _Way) -> ast.expr:
        """The norm that is called behind a sum, or None."""
        none = ast.Constant(None)
        if way.norm is not None:
            self.names.append(way.norm.attr)
            return way.norm
        if way.test is None:
            return none
        first, second = map(self._chosen, way.ways)
        norm = first
        if ast.dump(first) != ast.dump(second):
            norm = ast.IfExp(way.test, first, second)
        asked = _asked(way.test)
        if asked is None or isinstance(norm, ast.Constant):
            return norm
        return ast.IfExp(self._call(IS_PLAIN, asked), norm, none)


class _Replacing(ast.NodeTransformer):
    """Replaces nodes by others, and by several lines."""

    def __init__(self, by_node: dict[Any, Any]):
        self.by_node = by_node

    def visit(self, node: ast.AST) -> Any:
        new = self.by_node.get(node)
        if isinstance(new, list):
            return [self.generic_visit(line) for line in new]
        return new or self.generic_visit(node)


def _merged(first: _Behind | None, second: _Behind | None) -> _Behind | None:
    """What a place is that two places lead to."""
    if first is None or second is None or not (first.ways and second.ways):
        return first and second and (first if first.ways else second)
    if first.x != second.x:
        return None
    return _Behind(first.x, first.ways + second.ways, first.changed | second.changed)


def _asked(test: ast.expr) -> ast.expr | None:
    """The value whose truth is asked in a test; None for comparisons."""
    while isinstance(test, ast.UnaryOp):
        test = test.operand
    return None if isinstance(test, (ast.Compare, ast.BoolOp)) else test
