"""Rewriter: what the rewriters of a block's forward share."""

import ast
import inspect
from types import FunctionType
from typing import Any

from torch import nn

from .forwards import SUM, reads_parameters

NORM = "_tilenorm_norm"  # a local variable: the norm that is called next
# Methods of a rewritten class. A forward may have variables of its own that are named as builtins.
ONE_PASS, ROTATED, GETATTR = "_tilenorm_one_pass", "_tilenorm_rotated", "_tilenorm_getattr"


class Rewriter(ast.NodeTransformer):
    """Rewrites expressions, and statements that stand in a row. names: of the norms that the
    rewritten code computes. functions: what the forward uses of its module, by name. cls: the
    block's class. absent: what was not found, before "a patched norm".
    """

    absent: str
    assigns = True  # whether an expression may assign to a variable where it stands

    def __init__(
        self, this: str, norms: tuple[str, ...], functions: dict[str, Any], cls: type[nn.Module]
    ):
        self.this, self.norms, self.functions, self.cls = this, norms, functions, cls
        self.names: list[str] = []

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            if isinstance(getattr(node, name, None), list):
                setattr(node, name, self._rewritten(getattr(node, name)))
        return node

    def _rewritten(self, statements: list[Any]) -> list[Any]:
        return statements

    def _is_norm(self, called: ast.expr) -> bool:
        match called:
            case ast.Attribute(ast.Name(this), norm):
                return this == self.this and norm in self.norms
        return False

    def _call(self, name: str, *arguments: ast.expr) -> ast.Call:
        function = ast.Attribute(ast.Name(self.this, ast.Load()), name, ast.Load())
        return ast.Call(function, list(arguments), [])

    def _normed(self, node: ast.expr, norm: Any, terms: list, by_group: list) -> Any:
        """In the place of a node: the norm alone of what one pass makes."""
        self.names.append(norm.attr)
        both = self._call(ONE_PASS, norm, ast.Tuple(terms, ast.Load()), *by_group)
        if len(terms) > 1 and self.assigns:
            both.args[0] = ast.Name(NORM, ast.Load())
            cls = ast.NamedExpr(ast.Name(NORM, ast.Store()), norm)
            cls = ast.Attribute(cls, "__class__", ast.Load())
            both.func = self._call(GETATTR, cls, ast.Constant(SUM), both.func)
        return ast.copy_location(ast.Subscript(both, ast.Constant(1), ast.Load()), node)


def reads_plainly(cls: type[nn.Module], name: str) -> bool:
    """Whether no code of a class runs where an attribute of an instance is read."""
    if not hasattr(cls, name):
        return reads_parameters(cls, name)
    value = inspect.getattr_static(cls, name)
    plain = isinstance(value, (FunctionType, staticmethod, classmethod))
    return cls.__getattribute__ is object.__getattribute__ and (
        plain or not hasattr(type(value), "__get__")
    )


def names_in(nodes: list, name: str) -> bool:
    """Whether a variable is named in expressions."""
    inside = (part for node in nodes for part in ast.walk(node))
    return any(isinstance(part, ast.Name) and part.id == name for part in inside)
