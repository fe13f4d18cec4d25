"""Blocks of a model: what stands around a norm in a forward, computed with the norm.

A block's forward is a Python function, whose source is read. Where a patched norm follows the sum
that it normalises, one call of add_rms_norm or add_layer_norm computes both:

    x = a + b                     x, normed = self.sum_and_norm(a, b, self.norm)
    residual = x                  residual = x
    x = self.norm(x)              x = normed

    x = self.norm(a + b)          x = self.sum_and_norm(a, b, self.norm)[1]

Where a modulation follows a patched norm, one call of modulated_rms_norm or modulated_layer_norm
computes both, with or without the shift:

    self.norm(x) * (1 + a) + b    self.modulated(self.norm, x, a, b)

    x = self.norm(x)              x = self.modulated(self.norm, x, a, b)
    x = x * (1 + a) + b

With a sum right before the norm, sum_and_modulated computes all three.

Where queries and keys are normalised and then rotated, by a function with the numbers of Hugging
Face's apply_rotary_pos_emb, one call of rms_norm_rope computes all:

    q = self.q_norm(x)            q = x
    k = self.k_norm(y)            k = y
    q, k = apply(q, k, c, s)      q, k = self.rotated(apply, self.q_norm, self.k_norm, …)

Heads and tokens may be swapped between, after a view of all heads of a token or without one.

The call decides at every run whether tilenorm's function gives what the statements give, and runs
the statements otherwise.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache, partial, update_wrapper
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from ...ops.torch_private import is_its_forward
from .classes import PatchedModule, content_of, patched_subclass
from .rotary import PLACES, casts_back, is_rotary, norm_at, rotate

NORMED = "_tilenorm_normed_{}"  # a local variable: what the norm makes of the sum of that number


class Names:
    """Of the methods that a rewritten forward calls."""

    SUM_AND_NORM = "_tilenorm_sum_and_norm"
    MODULATED = "_tilenorm_modulated"
    SUM_AND_MODULATED = "_tilenorm_sum_and_modulated"
    ROTATED = "_tilenorm_rotated"


class Unchanged(Exception):
    """The forward of a class keeps its sums; the message gives the reason."""


class PatchedBlock(PatchedModule):
    """Mixin of the class of a block whose forward is rewritten."""

    # The names of the norms that a sum stands before, and of those that a modulation or a rotation
    # follows.
    _tilenorm_sums: list[str]
    _tilenorm_modulations: list[str]
    _tilenorm_rotations: list[str]

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

    @staticmethod
    def _tilenorm_modulated(
        norm: nn.Module, x: Tensor, scale: Tensor, shift: Tensor | None = None
    ) -> Tensor:
        """The norm of x, times 1 + scale, plus shift."""
        form = getattr(type(norm), "_tilenorm_form", None)
        if form is not None and is_its_forward(norm):
            found = form.modulate(norm, x, scale, shift)
            if found is not None:
                return found
        y = norm(x) * (1 + scale)
        return y if shift is None else y + shift

    @staticmethod
    def _tilenorm_sum_and_modulated(
        norm: nn.Module, a: Tensor, b: Tensor, scale: Tensor, shift: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """a + b, and the norm of it, times 1 + scale, plus shift."""
        form = getattr(type(norm), "_tilenorm_form", None)
        if form is not None and is_its_forward(norm):
            found = form.modulate(norm, a, scale, shift, b)
            if found is not None:
                return found[::-1]
        total = a + b
        return total, PatchedBlock._tilenorm_modulated(norm, total, scale, shift)

    @staticmethod
    def _tilenorm_rotated(
        apply: Callable,
        q_norm: nn.Module,
        k_norm: nn.Module,
        place: str,
        casts: bool,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The norms of q and k, which stand at a place of PLACES, and their rotation by `apply`.
        casts: as that of casts_back.
        """
        norms = q_norm, k_norm
        if all(hasattr(type(norm), "_tilenorm_form") and is_its_forward(norm) for norm in norms):
            found = rotate(norms, (q, k), cos, sin, place == "before the view", casts)
            if found is not None:
                return found
        return apply(norm_at(q_norm, q, place), norm_at(k_norm, k, place), cos, sin)


@cache
def patched_block(
    cls: type[nn.Module], norms: tuple[str, ...], kinds: tuple[str, ...] = ("sums",)
) -> type[nn.Module]:
    """A subclass of a block's class with the same name, whose forward computes more at once with
    the norms of these attributes. kinds: some of REWRITERS, in this order.

    Decorators of the forward that keep the function, as functools.wraps does, stay around it.
    Raises Unchanged if the forward has no such place, or cannot be rewritten.
    """
    wrappers, forward = [], cls.forward
    while hasattr(forward, "__wrapped__"):
        wrappers.append(forward)
        forward = forward.__wrapped__
    tree: Any = _parsed(forward, bool(wrappers))
    used = forward.__code__.co_names  # no local variables
    functions = {name: f for name, f in forward.__globals__.items() if name in used}
    found: dict[str, list[str]] = {"sums": [], "modulations": [], "rotations": []}
    for kind in kinds:
        rewriter = REWRITERS[kind](tree.body[0].args.args[0].arg, norms, functions)
        tree, found[kind] = rewriter.visit(tree), rewriter.found
    made = _compiled(tree, forward)
    if not any(found.values()):
        raise Unchanged(" and ".join(REWRITERS[kind].absent for kind in kinds))
    for wrapper in reversed(wrappers):
        made = _wrapping(wrapper, made)
    options = {f"_tilenorm_{kind}": names for kind, names in found.items()}
    again = patched_block, cls, norms, kinds
    return patched_subclass(PatchedBlock, cls, made, _tilenorm_made=again, **options)


def _parsed(forward: FunctionType, is_wrapped: bool) -> ast.Module:
    """A module that holds the definition of a forward, at its place in its file."""
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
    match tree.body:
        case [ast.FunctionDef(args=ast.arguments(args=[_, *_])) as function]:
            if function.decorator_list and not is_wrapped:
                raise Unchanged("a decorator of its forward does not keep the function")
            return ast.increment_lineno(tree, first - 1)
    raise Unchanged("its forward is no method")


def _compiled(tree: ast.Module, forward: FunctionType) -> FunctionType:
    """The function that a module defines, in the place of a forward."""
    ast.fix_missing_locations(tree)
    code = compile(tree, forward.__code__.co_filename, "exec", dont_inherit=True)
    body = next(c for c in code.co_consts if getattr(c, "co_name", "") == forward.__code__.co_name)
    made = _like(forward, body, None, forward)
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
    again.cell_contents = _like(wrapper, wrapper.__code__, tuple(replaced), inner)
    return again.cell_contents


def _like(
    function: FunctionType, code: CodeType, closure: tuple | None, named: FunctionType
) -> Any:
    """A function with other code and another closure, and the name and documentation of one."""
    made = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(made, named)


class _Rewriter(ast.NodeTransformer):
    """Rewrites expressions, and statements that stand in a row. found: of which norms. functions:
    what the forward uses of its module, by name.
    """

    absent: str  # what there is none of where nothing is found

    def __init__(self, this: str, norms: tuple[str, ...], functions: dict[str, Any]):
        self.this, self.norms, self.functions, self.found = this, norms, functions, []

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            if isinstance(getattr(node, name, None), list):
                setattr(node, name, self._rewritten(getattr(node, name)))
        return node

    def _rewritten(self, statements: list[Any]) -> list[Any]:
        raise NotImplementedError

    def _is_norm(self, called: ast.expr) -> bool:
        match called:
            case ast.Attribute(ast.Name(this), norm):
                return this == self.this and norm in self.norms
        return False

    def _call(self, name: str, norm: ast.Attribute, *arguments: ast.expr) -> ast.Call:
        self.found.append(norm.attr)
        function = ast.Attribute(ast.Name(self.this, ast.Load()), name, ast.Load())
        return ast.Call(function, list(arguments), [])


class _Sums(_Rewriter):
    """Rewrites each `x = a + b`, copies of x, and `y = self.norm(x)` that stand in a row, and each
    `self.norm(a + b)`.
    """

    absent = "no sum of two terms stands right before a patched norm"

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(norm, [ast.BinOp(op=ast.Add()) as total], []) if self._is_norm(norm):
                both = self._both(total, norm)
                return ast.copy_location(ast.Subscript(both, ast.Constant(1), ast.Load()), node)
        return node

    def _rewritten(self, statements: list[Any]) -> list[Any]:
        """The statements, with a sum and its norm as one call where the sum stands."""
        made, place, total = [], 0, None  # the sum is made[place], and total is its name
        for statement in statements:
            match statement:
                case ast.Assign([ast.Name(_)] as targets, ast.Call(norm, [ast.Name(name)], [])) if (
                    name == total and self._is_norm(norm)
                ):
                    both = self._both(made[place].value, norm)
                    statement, total = self._at_the_sum(made, place, both, statement, targets), None
                case ast.Assign(
                    [ast.Name(_)] as targets,
                    ast.Call(
                        ast.Attribute(attr=Names.MODULATED), [norm, ast.Name(name), *by_group], []
                    ),
                ) if name == total and place == len(made) - 1 and not _names(by_group, total):
                    terms = made[place].value.left, made[place].value.right
                    both = self._call(Names.SUM_AND_MODULATED, norm, norm, *terms, *by_group)
                    statement, total = self._at_the_sum(made, place, both, statement, targets), None
                case ast.Assign([ast.Name(name)], ast.BinOp(op=ast.Add())):
                    place, total = len(made), name
                case ast.Assign([ast.Name(copy)], ast.Name(name)) if copy != name == total:
                    pass
                case _:
                    total = None
            made.append(statement)
        return made

    def _at_the_sum(self, made: list, place: int, both: ast.Call, last: Any, targets: list) -> Any:
        """Has a call stand where the sum made[place] stands. Returns what stands in the place of
        the last statement, which assigns to `targets`.
        """
        normed, first = NORMED.format(len(self.found)), made[place]
        names = ast.Tuple([*first.targets, ast.Name(normed, ast.Store())], ast.Store())
        made[place] = ast.copy_location(ast.Assign([names], both), first)
        return ast.copy_location(ast.Assign(targets, ast.Name(normed, ast.Load())), last)

    def _both(self, total: ast.BinOp, norm: ast.Attribute) -> ast.Call:
        return self._call(Names.SUM_AND_NORM, norm, total.left, total.right, norm)


class _Modulations(_Rewriter):
    """Rewrites each `self.norm(x) * (1 + a) + b`, with or without b, and each `y = self.norm(x)`
    right before `y = y * (1 + a) + b`.
    """

    absent = "no modulation stands right behind a patched norm"

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        match self._modulated(node):
            case ast.Call(norm, [x], []), *by_group if self._is_norm(norm):
                node = self._at(node, norm, x, by_group)
        return self.generic_visit(node)

    def _rewritten(self, statements: list[Any]) -> list[Any]:
        made: list[Any] = []
        for statement in statements:
            match made[-1:], statement:
                case (
                    [ast.Assign([ast.Name(y)], ast.Call(norm, [x], []))],
                    ast.Assign([ast.Name(again)], ast.BinOp() as value),
                ) if y == again and self._is_norm(norm):
                    match self._modulated(value):
                        case ast.Name(name), *by_group if name == y and not _names(by_group, y):
                            statement.value = self._at(value, norm, x, by_group)
                            made.pop()
            made.append(statement)
        return made

    def _at(self, node: ast.expr, norm: Any, x: ast.expr, by_group: list) -> Any:
        made = self._call(Names.MODULATED, norm, norm, x, *by_group)
        return ast.copy_location(made, node)

    def _modulated(self, node: ast.AST) -> tuple[ast.expr, ...]:
        """y, a and b of y * (1 + a) + b, y and a of y * (1 + a), or ()."""
        match node:
            case ast.BinOp(op=ast.Add()):
                for product, shift in _in_turn(node):
                    match product:
                        case ast.BinOp(op=ast.Mult()) if found := self._modulated(product):
                            return *found, shift
            case ast.BinOp(op=ast.Mult()):
                for y, factor in _in_turn(node):
                    if (scale := _less_one(factor)) is not None:
                        return y, scale
        return ()


class _Rotations(_Rewriter):
    """Rewrites norms of two variables that are then rotated, with nothing between that names them
    but a swap of heads and tokens, and a view.
    """

    absent = "no rotation stands behind patched norms of queries and keys"

    def _rewritten(self, statements: list[Any]) -> list[Any]:
        # By variable: the norm's attribute, what takes the norm out, and the methods behind it.
        normed: dict[str, tuple[ast.Attribute, Callable, tuple[str, ...]]] = {}
        for statement in statements:
            name: Any = None
            value = getattr(statement, "value", None)
            match statement:
                case ast.Assign([ast.Name(name)], ast.Call()):
                    methods, inner, holder = _peeled(value)
                    match inner:
                        case ast.Call(norm, [x], []) if self._is_norm(norm):
                            _forget(normed, statement)
                            put = partial(setattr, holder or statement, "value", x)
                            normed[name] = norm, put, methods
                            continue
                        case ast.Name(again) if again == name and name in normed:
                            norm, put, before = normed[name]
                            normed[name] = norm, put, (*before, *methods)
                            continue
                case ast.Assign(
                    [ast.Tuple([ast.Name(), ast.Name()])], ast.Call(ast.Name(), given, [])
                ):
                    self._rotate(statement, given, normed)
            _forget(normed, statement)
        return statements

    def _rotate(self, statement: Any, given: list, normed: dict[str, tuple]) -> None:
        """Have a rotation of two variables that are normalised call what computes both."""
        match given:
            case [ast.Name(q), ast.Name(k), cos, sin] if q != k and {q, k} <= normed.keys():
                (q_norm, put_q, place), (k_norm, put_k, other) = normed[q], normed[k]
                apart = any(_names([cos, sin], name) for name in (q, k))
                function = statement.value.func
                rotates = is_rotary(self.functions.get(function.id))
                if place == other and place in PLACES and rotates and not apart:
                    put_q()
                    put_k()
                    self.found.append(q_norm.attr)
                    casts = ast.Constant(casts_back(self.functions[function.id]))
                    at = q_norm, k_norm, ast.Constant(PLACES[place]), casts
                    made = self._call(Names.ROTATED, k_norm, function, *at, *given)
                    statement.value = ast.copy_location(made, statement.value)


REWRITERS = {"modulations": _Modulations, "sums": _Sums, "rotations": _Rotations}


def _peeled(value: ast.AST) -> tuple[tuple[str, ...], ast.AST, ast.Attribute | None]:
    """The methods .view(…) and .transpose(1, 2) that are called last, what they are called on, and
    the attribute that holds it.
    """
    methods: list[str] = []
    holder = None
    while True:
        match value:
            case ast.Call(ast.Attribute(inner, "view") as attribute, [_, *_], []):
                pass
            case ast.Call(
                ast.Attribute(inner, "transpose") as attribute,
                [ast.Constant(1), ast.Constant(2)],
                [],
            ):
                pass
            case _:
                return tuple(methods), value, holder
        methods.insert(0, attribute.attr)
        holder, value = attribute, inner


def _forget(variables: dict[str, Any], statement: ast.AST) -> None:
    """Drop the variables that a statement names."""
    for name in [name for name in variables if _names([statement], name)]:
        del variables[name]


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


def _names(nodes: list, name: str) -> bool:
    """Whether a variable is named in expressions."""
    inside = (part for node in nodes for part in ast.walk(node))
    return any(isinstance(part, ast.Name) and part.id == name for part in inside)
