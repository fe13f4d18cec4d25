"""Blocks of a model: a sum and the norm behind it as one add_rms_norm or add_layer_norm.

A block's forward is a Python function. Its source is read, and where a patched norm follows the sum
that it normalises, one call computes both:

    x = a + b                     x, normed = self.sum_and_norm(a, b, self.norm)
    residual = x                  residual = x
    x = self.norm(x)              x = normed

    x = self.norm(a + b)          x = self.sum_and_norm(a, b, self.norm)[1]

The call decides at every run whether tilenorm's function gives what the two statements give, and
runs the statements otherwise.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cache, update_wrapper
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

from ...ops.torch_private import is_its_forward
from .classes import PatchedModule, patched_subclass
from .replaced import content_of

NORMED = "_tilenorm_normed_{}"  # a local variable: what the norm makes of the sum of that number


class Unchanged(Exception):
    """The forward of a class keeps its sums; the message gives the reason."""


class PatchedBlock(PatchedModule):
    """Mixin of the class of a block whose forward is rewritten."""

    _tilenorm_sums: tuple[str, ...]  # the names of the norms that a sum stands before

    @staticmethod
    def _tilenorm_sum_and_norm(a: Tensor, b: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """a + b, and the norm of it."""
        form = getattr(type(norm), "_tilenorm_form", None)  # peft's wrappers pass attributes on
        if form is not None and is_its_forward(norm):
            found = form.add(norm, a, b)
            if found is not None:
                return found
        total = a + b
        return total, norm(total)


@cache
def patched_block(cls: type[nn.Module], norms: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of a block's class with the same name, whose forward adds and normalises at once
    in front of the norms of these attributes.

    Raises Unchanged if the forward has no such place, or cannot be rewritten.
    """
    forward, sums = rewritten(cls, norms)
    options = {"_tilenorm_made": (patched_block, cls, norms), "_tilenorm_forward": forward}
    return patched_subclass(PatchedBlock, cls, _tilenorm_sums=sums, **options)


def rewritten(cls: type[nn.Module], norms: tuple[str, ...]) -> tuple[Callable, tuple[str, ...]]:
    """The forward of a class with its sums and norms as one call, and the norms that it calls so.

    Decorators that keep the function that they decorate, as functools.wraps does, stay around it.
    """
    wrappers, forward = [], cls.forward
    while hasattr(forward, "__wrapped__"):
        wrappers.append(forward)
        forward = forward.__wrapped__
    function, tree = _parsed(forward, bool(wrappers))
    finder = _Sums(function.args.args[0].arg, norms)
    finder.visit(function)
    if not finder.found:
        raise Unchanged("no sum of two terms stands right before a patched norm")
    made = _compiled(function, tree, forward)
    for wrapper in reversed(wrappers):
        made = _wrapping(wrapper, made)
    return made, tuple(dict.fromkeys(finder.found))


def _parsed(forward: FunctionType, wrapped: bool) -> tuple[ast.FunctionDef, ast.Module]:
    """The definition of a forward, and the module that holds it alone, at its place in its file."""
    if not isinstance(forward, FunctionType):
        raise Unchanged("its forward is no Python function")
    if forward.__closure__:
        raise Unchanged("its forward uses variables of another function, or super()")
    if any(name.startswith("__") and not name.endswith("__") for name in forward.__code__.co_names):
        raise Unchanged("its forward uses names that belong to its class")
    try:
        lines, first = inspect.getsourcelines(forward)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError) as error:
        raise Unchanged("its forward has no source") from error
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        raise Unchanged("its forward is no method")
    if function.decorator_list and not wrapped:
        raise Unchanged("a decorator of its forward does not keep the function")
    ast.increment_lineno(tree, first - 1)
    return function, tree


def _compiled(function: ast.FunctionDef, tree: ast.Module, forward: FunctionType) -> FunctionType:
    """The rewritten function. What is evaluated where a function is defined, is taken over."""
    function.decorator_list, function.returns = [], None
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.annotation = None
    given = function.args
    given.defaults = [ast.Constant(None) for _ in given.defaults]
    given.kw_defaults = [default and ast.Constant(None) for default in given.kw_defaults]
    ast.fix_missing_locations(tree)
    code = compile(tree, forward.__code__.co_filename, "exec", dont_inherit=True)
    (body,) = (c for c in code.co_consts if inspect.iscode(c))
    made: Any = FunctionType(body, forward.__globals__, forward.__name__, forward.__defaults__)
    made.__kwdefaults__, made.__annotations__ = forward.__kwdefaults__, forward.__annotations__
    update_wrapper(made, forward, updated=())
    del made.__wrapped__  # it calls no other function
    return made


def _wrapping(wrapper: Any, inner: FunctionType) -> FunctionType:
    """A decorated function that calls another one: its closure holds that one instead."""
    cells = wrapper.__closure__ or () if isinstance(wrapper, FunctionType) else ()
    held = [content_of(cell) for cell in cells]
    if sum(value is wrapper.__wrapped__ for value in held) != 1:
        raise Unchanged("a decorator of its forward keeps the function where it cannot be replaced")
    again = CellType()  # a wrapper may name itself
    replaced = [
        CellType(inner) if value is wrapper.__wrapped__ else again if value is wrapper else cell
        for value, cell in zip(held, cells, strict=True)
    ]
    made = FunctionType(
        wrapper.__code__,
        wrapper.__globals__,
        wrapper.__name__,
        wrapper.__defaults__,
        tuple(replaced),
    )
    made.__kwdefaults__ = wrapper.__kwdefaults__
    again.cell_contents = made
    return update_wrapper(made, inner)


class _Sums(ast.NodeTransformer):
    """Rewrites each `x = a + b`, copies of x, and `y = self.norm(x)` that stand in a row, and each
    `self.norm(a + b)`.
    """

    def __init__(self, this: str, norms: tuple[str, ...]):
        self.this, self.norms, self.found = this, norms, []

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, list(self._rewritten(statements)))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        norm: Any = node.func
        if not self._is_norm_of(node) or not _is_sum(node.args[0]):
            return node
        self.found.append(norm.attr)
        both = self._call(node.args[0], norm)
        return ast.copy_location(ast.Subscript(both, ast.Constant(1), ast.Load()), node)

    def _rewritten(self, statements: list[Any]) -> Iterator[ast.stmt]:
        rest = list(statements)
        while rest:
            first = rest.pop(0)
            end = self._norm_behind(first, rest)
            if end is None:
                yield first
                continue
            copies, last, rest = rest[:end], rest[end], rest[end + 1 :]
            norm = last.value.func
            normed = NORMED.format(len(self.found))
            self.found.append(norm.attr)
            names = ast.Tuple([*first.targets, ast.Name(normed, ast.Store())], ast.Store())
            yield ast.copy_location(ast.Assign([names], self._call(first.value, norm)), first)
            yield from copies
            yield ast.copy_location(ast.Assign(last.targets, ast.Name(normed, ast.Load())), last)

    def _norm_behind(self, first: Any, rest: list[Any]) -> int | None:
        """Where the norm of a sum stands behind it, past copies of the sum; None if it does not."""
        total = _assigned(first)
        if total is None or not _is_sum(first.value):
            return None
        for number, statement in enumerate(rest):
            target = _assigned(statement)
            if target is None:
                return None
            value = statement.value
            if isinstance(value, ast.Name) and value.id == total and target != total:
                continue
            is_norm = self._is_norm_of(value) and ast.unparse(value.args[0]) == total
            return number if is_norm else None
        return None

    def _is_norm_of(self, value: ast.expr) -> bool:
        """Whether an expression calls one of the norms with one argument."""
        match value:
            case ast.Call(ast.Attribute(ast.Name(this), norm), [_], []):
                return this == self.this and norm in self.norms
        return False

    def _call(self, total: ast.BinOp, norm: ast.expr) -> ast.Call:
        this = ast.Name(self.this, ast.Load())
        function = ast.Attribute(this, "_tilenorm_sum_and_norm", ast.Load())
        return ast.Call(function, [total.left, total.right, norm], [])


def _assigned(statement: ast.stmt) -> str | None:
    """The one name that a statement assigns to, or None."""
    match statement:
        case ast.Assign([ast.Name(name)]):
            return name
    return None


def _is_sum(value: ast.expr) -> bool:
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
