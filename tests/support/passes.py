"""Passes of the engine that ask for a part of the gradients, graphs for them, and their work."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilenorm

from .calls import call, leaves_of


class Seen(TorchDispatchMode):
    """Sees every operation, so that the functions call the op. A guard of Dynamo does not see it.

    ops: those seen. calls: tilenorm's, with their arguments, which get no gradients.
    """

    def __init__(self):
        super().__init__()
        self.ops, self.calls = [], []

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        if func.namespace == "tilenorm":
            self.calls.append((func, tuple(map(detached, args))))
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    """Keeps the calls of tilenorm's and PyTorch's norms that it sees, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if "norm" in getattr(function, "__name__", ""):
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else value


def named(op, arguments: tuple) -> dict:
    """All arguments of a call of an op, by their names."""
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    return given | dict(zip(given, arguments, strict=False))


def changed(op, arguments: tuple, **changes) -> tuple:
    """The same with others in the place of some."""
    return tuple((named(op, arguments) | changes).values())


def distances(t: torch.Tensor) -> list[int]:
    """The strides that count."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def check_decomposition(op, arguments: tuple) -> None:
    """The decomposition's results are those of the op, absent ones included."""
    results = tilenorm.decompositions()[op](*arguments), op(*arguments)
    results = [(r,) if isinstance(r, torch.Tensor) else r for r in results]
    for got, wanted in zip(*results, strict=True):
        assert distances(got) == distances(wanted) or not wanted.numel()
        torch.testing.assert_close(got, wanted)


def by_op(form, tensors, **options):
    with Seen():
        return call(form, tensors, **options)


def checkpointed(form, tensors, **options):
    """The tensors that checkpoint keeps for the recomputation are those that it is given."""

    def run(*given):
        return call(form, dict(zip(tensors, given, strict=True)), **options)

    return checkpoint(run, *tensors.values(), use_reentrant=False)


FUNCTIONS = {"function": call, "op": by_op, "checkpoint": checkpointed}


def by_grad(outputs, inputs, incoming, **options):
    return torch.autograd.grad(
        outputs, inputs, incoming, retain_graph=True, allow_unused=True, **options
    )


def by_inputs(outputs, inputs, incoming, **options):
    for tensor in inputs:
        tensor.retain_grad()
        tensor.grad = None
    torch.autograd.backward(outputs, incoming, inputs=inputs, retain_graph=True, **options)
    return [tensor.grad for tensor in inputs]


WAYS = {"grad": by_grad, "inputs": by_inputs}


def recorded(tensors, leaves=None):
    """Tensors that require gradients: leaves, and results of another operation."""
    found = leaves_of({n: t.clone() for n, t in tensors.items()})
    made = {n for n, t in found.items() if t.requires_grad} - {
        *(found if leaves is None else leaves)
    }
    return {n: t * 1 if n in made else t for n, t in found.items()}


def computed(tensors, asked) -> set[str]:
    """What is to be computed: one gradient serves several tensors."""
    asked, dtypes = set(asked) - {"skip"}, {n: t.dtype for n, t in tensors.items()}
    if "layer_scale" in asked:
        asked = asked - {"layer_scale"} | {"residual"}
    if "addend" in asked:
        alike = dtypes["addend"] == dtypes["input"]
        asked = asked - {"addend"} | {"input" if alike else "residual"}
    branch = {"dropout_mask", "layer_scale"} & tensors.keys()
    if "residual" in asked and dtypes["residual"] == dtypes["input"] and not branch:
        asked = asked - {"residual"} | {"input"}
    return asked


def passes(tensors, asked) -> list[set[str]]:
    """What the backward passes are to compute: there is none that computes nothing."""
    found = computed(tensors, asked)
    return [found] if found else []
