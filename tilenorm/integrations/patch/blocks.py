"""Blocks of a model: what stands around a norm in a forward, computed with the norm.

A block's forward is a Python function, whose source is read. Where a patched norm follows the sum
that it normalises, one call of add_rms_norm or add_layer_norm computes both: see sums.py.

Where a modulation follows a patched norm, one call of modulated_rms_norm or modulated_layer_norm
computes both, with or without the shift, and a sum right before the norm too:

    self.norm(x) * (1 + a) + b    self.one_pass(self.norm, (x,), a, b)[1]

    x = self.norm(x)              x = self.one_pass(self.norm, (x,), a, b)[1]
    x = x * (1 + a) + b

Where queries and keys are normalised and then rotated, by a function with the numbers of Hugging
Face's apply_rotary_pos_emb, one call of rms_norm_rope computes all:

    q = self.q_norm(x)            q = x
    k = self.k_norm(y)            k = y
    q, k = apply(q, k, c, s)      q, k = self.rotated(apply, self.q_norm, self.k_norm, …)

Heads and tokens may be swapped between, after a view of all heads of a token or without one. A call
decides at every run whether tilenorm's function gives what the statements give, and runs
the statements otherwise.
"""

import ast
import inspect
import textwrap
from functools import cache, partial, update_wrapper
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

from .classes import content_of, patched_subclass
from .forwards import one_pass
from .rewriter import GETATTR, ONE_PASS, ROTATED, Rewriter, names_in
from .rotary import PLACES, casts_back, rotated
from .sums import IS_PLAIN, Sums, is_plain
from .twin import Unrecognised

# In the report and in this order: what is rewritten by each of REWRITERS.
WHAT = {"residual": "sum before", "modulation": "modulation of", "rotation": "rotation of"}


@cache
def patched_block(
    cls: type[nn.Module], norms: tuple[str, ...], kinds: tuple[str, ...]
) -> type[nn.Module]:
    """A subclass of a block's class with the same name, whose forward computes more at once with
    the norms of these attributes. kinds: some of REWRITERS, in this order. Decorators that keep the
    function, as functools.wraps does, stay around the forward.

    Raises Unrecognised if the forward has no such place, or cannot be rewritten.
    """
    wrappers, forward = [], cls.forward
    while hasattr(forward, "__wrapped__"):
        wrappers.append(forward)
        forward = forward.__wrapped__
    tree: Any = _parsed(forward, bool(wrappers))
    used = forward.__code__.co_names  # no local variables
    functions = {name: f for name, f in forward.__globals__.items() if name in used}
    norms_of_kind: dict[str, dict[str, None]] = {}
    for kind in kinds:
        rewriter = REWRITERS[kind](tree.body[0].args.args[0].arg, norms, functions, cls)
        tree, norms_of_kind[kind] = rewriter.visit(tree), dict.fromkeys(rewriter.names)
    texts = [
        f"the {WHAT[kind]} {' and '.join(norms_of_kind[kind])}"
        for kind in WHAT
        if norms_of_kind.get(kind)
    ]
    if not texts:
        absent = " or ".join(REWRITERS[kind].absent for kind in WHAT if kind in kinds)
        raise Unrecognised(f"its forward has no {absent} a patched norm")
    function = _compiled(tree, forward)
    for wrapper in reversed(wrappers):
        function = _wrapping(wrapper, function)
    how = f"{' and '.join(texts)} with the norm, wherever its forward computes them"
    again = patched_block, cls, norms, kinds
    methods = {ONE_PASS: one_pass, ROTATED: rotated, GETATTR: getattr, IS_PLAIN: is_plain}
    namespace = {name: staticmethod(method) for name, method in methods.items()}
    return patched_subclass(cls, function, again, lambda _: how, namespace)


def _parsed(forward: FunctionType, is_wrapped: bool) -> ast.Module:
    """A module that holds the definition of a forward, at its place in its file."""
    if not isinstance(forward, FunctionType):
        raise Unrecognised("its forward is no Python function")
    if forward.__closure__:
        raise Unrecognised("its forward uses variables of another function, or super()")
    if any(name.startswith("__") and not name.endswith("__") for name in forward.__code__.co_names):
        raise Unrecognised("its forward uses names that belong to its class")
    try:
        lines, first = inspect.getsourcelines(forward)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError) as error:
        raise Unrecognised("its forward has no source") from error
    match tree.body:
        case [ast.FunctionDef(args=ast.arguments(args=[_, *_])) as function]:
            if function.decorator_list and not is_wrapped:
                raise Unrecognised("a decorator of its forward does not keep the function")
            return ast.increment_lineno(tree, first - 1)
    raise Unrecognised("its forward is no method")


def _compiled(tree: ast.Module, forward: FunctionType) -> FunctionType:
    """The function that a module defines, in the place of a forward."""
    ast.fix_missing_locations(tree)
    code = compile(tree, forward.__code__.co_filename, "exec", dont_inherit=True)
    body = next(c for c in code.co_consts if getattr(c, "co_name", "") == forward.__code__.co_name)
    function = _like(forward, body, None, forward)
    del function.__wrapped__  # it calls no other function
    return function


def _wrapping(wrapper: Any, inner: FunctionType) -> FunctionType:
    """A decorated function that calls another one: its closure holds that one instead."""
    cells = wrapper.__closure__ or () if isinstance(wrapper, FunctionType) else ()
    held = [content_of(cell) for cell in cells]
    if sum(value is wrapper.__wrapped__ for value in held) != 1:
        raise Unrecognised(
            "a decorator of its forward keeps the function where it cannot be replaced"
        )
    again = CellType()  # a wrapper may name itself
    replaced = [
        CellType(inner) if value is wrapper.__wrapped__ else again if value is wrapper else cell
        for value, cell in zip(held, cells, strict=True)
    ]
    again.cell_contents = _like(wrapper, wrapper.__code__, tuple(replaced), inner)
    return again.cell_contents


def _like(
    function: FunctionType, code: CodeType, closure: tuple | None, named: FunctionType
) -> Any:
    """A function with other code and another closure, and the name and documentation of one."""
    copy = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(copy, named)


class _Modulations(Rewriter):
    """Rewrites each `self.norm(x) * (1 + a) + b`, with or without b, and each `y = self.norm(x)`
    right before `y = y * (1 + a) + b`.
    """

    absent = "modulation right behind"

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        match self._modulated(node):
            case ast.Call(norm, [x], []), *by_group if self._is_norm(norm):
                node = self._normed(node, norm, [x], by_group)
        return self.generic_visit(node)

    def _rewritten(self, statements: list[Any]) -> list[Any]:
        rewritten: list[Any] = []
        for statement in statements:
            match rewritten[-1:], statement:
                case (
                    [ast.Assign([ast.Name(y)], ast.Call(norm, [x], []))],
                    ast.Assign([ast.Name(again)], ast.BinOp() as value),
                ) if y == again and self._is_norm(norm):
                    match self._modulated(value):
                        case ast.Name(name), *by_group if name == y and not names_in(by_group, y):
                            statement.value = self._normed(value, norm, [x], by_group)
                            rewritten.pop()
            rewritten.append(statement)
        return rewritten

    def _modulated(self, node: ast.AST) -> tuple[ast.expr, ...]:
        """y, a and b of y * (1 + a) + b, y and a of y * (1 + a), or ()."""
        match node:
            case ast.BinOp(op=ast.Add()):
                for product, shift in _in_turn(node):
                    if len(parts := self._modulated(product)) == 2:
                        return *parts, shift
            case ast.BinOp(op=ast.Mult()):
                for y, factor in _in_turn(node):
                    if (scale := _less_one(factor)) is not None:
                        return y, scale
        return ()


class _Rotations(Rewriter):
    """Rewrites norms of two variables that are then rotated, with nothing between that names them
    but a swap of heads and tokens, and a view.
    """

    absent = "rotation of heads behind"

    def _rewritten(self, statements: list[Any]) -> list[Any]:
        for number, statement in enumerate(statements):
            match statement:
                case ast.Assign(
                    [ast.Tuple([ast.Name(), ast.Name()])],
                    ast.Call(
                        ast.Name(name) as apply, [ast.Name(q), ast.Name(k), cos, sin] as given, []
                    ),
                ) if q != k and not (names_in([cos, sin], q) or names_in([cos, sin], k)):
                    norms = [self._norm_before(statements[:number], head) for head in (q, k)]
                    places = {norm[2] for norm in norms if norm}
                    casts = casts_back(self.functions.get(name))
                    if None in norms or len(places) > 1 or not places <= PLACES or casts is None:
                        continue
                    for norm, take_out, _ in norms:
                        take_out()
                        self.names.append(norm.attr)
                    how = ast.Constant(places.pop()), ast.Constant(casts)
                    call = self._call(ROTATED, apply, *(norm for norm, *_ in norms), *how, *given)
                    statement.value = ast.copy_location(call, statement.value)
        return statements

    def _norm_before(self, statements: list[Any], head: str) -> tuple | None:
        """The norm in head = self.norm(x), what has the statement assign x instead, and the methods
        that are called behind the norm; None if other statements behind it name the variable.
        """
        methods: tuple[str, ...] = ()
        for statement in reversed(statements):
            match statement:
                case ast.Assign([ast.Name(name)], value) if name == head:
                    outer, inner, holder = _peeled(value)
                    methods = (*outer, *methods)
                    match inner:
                        case ast.Call(norm, [x], []) if self._is_norm(norm):
                            return norm, partial(setattr, holder or statement, "value", x), methods
                        case ast.Name(again) if again == head and outer:
                            continue
            if names_in([statement], head):
                return None
        return None


REWRITERS = {"modulation": _Modulations, "residual": Sums, "rotation": _Rotations}


def _peeled(value: ast.AST) -> tuple[tuple[str, ...], ast.AST, ast.Attribute | None]:
    """The methods .view(…) and .transpose(1, 2) that are called last, what they are called on, and
    the attribute that holds it.
    """
    methods: list[str] = []
    holder = None
    while True:
        match value:
            case ast.Call(
                ast.Attribute(inner, "view" as method) as attribute, [_, *_], []
            ) | ast.Call(
                ast.Attribute(inner, "transpose" as method) as attribute,
                [ast.Constant(1), ast.Constant(2)],
                [],
            ):
                methods.insert(0, method)
                holder, value = attribute, inner
            case _:
                return tuple(methods), value, holder


def _in_turn(node: ast.BinOp) -> tuple[tuple[ast.expr, ast.expr], ...]:
    return (node.left, node.right), (node.right, node.left)


def _less_one(node: ast.expr) -> ast.expr | None:
    """a of 1 + a; a[index] of (1 + a)[index]; None for others."""
    match node:
        case ast.Subscript(inner) if (scale := _less_one(inner)) is not None:
            return ast.copy_location(ast.Subscript(scale, node.slice, ast.Load()), node)
        case ast.BinOp(op=ast.Add()):
            for one, scale in _in_turn(node):
                match one:
                    case ast.Constant(1 | 1.0):
                        return scale
    return None
