"""A forward that was replaced on a module, and how it calls the forward of the module's class.

Hugging Face's tensor parallelism, among others, replaces `module.forward` by a function that moves
tensors before and after the forward that was there. The function keeps that forward, which is the
class's own, bound to the module, in its closure. Where the closure holds the forward of another
class, the function calls that one: what else the function does is untouched.
"""

from collections.abc import Iterator
from types import CellType, FunctionType, MethodType

from torch import nn


def calls_of_class(module: nn.Module) -> list[CellType]:
    """The cells that hold the class's forward, in the closure of a forward on the instance.

    The functions that the closure holds are searched too: a forward may be replaced twice.
    """
    replaced = vars(module).get("forward")
    return list(_cells(module, replaced, set())) if replaced else []


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give a module another class, whose forward a replaced forward calls from now on."""
    cells = calls_of_class(module)
    module.__class__ = cls
    for cell in cells:
        cell.cell_contents = MethodType(cls.forward, module)


def _cells(module: nn.Module, function: object, seen: set[int]) -> Iterator[CellType]:
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
        if value == MethodType(type(module).forward, module):
            yield cell
        else:
            yield from _cells(module, value, seen)
