"""A table of wrong calls of the modules and the integrations."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.fx import symbolic_trace

import tilenorm
from tilenorm.integrations.fx import replace_norms

from .wrong_calls import Function, W, Wrong, X, with_keywords

# Of each row: the arguments, for some the exception, and the message.
# Of the modules' constructors, with torch.nn's.
MADE = (
    ((None,), r"'normalized_shape' takes an int or .*, got NoneType"),
    (((8.0,),), r"'normalized_shape' takes an int or .*, got \(8\.0,\)"),
    ((-1,), r"'normalized_shape' takes .* from 0 on, got \(-1,\)"),
    ((2**70,), r"'normalized_shape' takes .* ints.*, got \(1180591"),
    ((8, {"dtype": "float32"}), r"'dtype' takes a torch.dtype .*, got str"),
    ((8, {"dtype": torch.int32}), r"'dtype' takes a floating.*, got torch.int32"),
    ((8, {"device": "nowhere"}), r"one of cpu, cuda.* device string: nowhere"),
    ((8, {"device": []}), r"device'? ?(must be torch.device, not |=)list"),
)

# Of the modules' constructors alone.
MADE_ALONE = (
    ((8, {"offset": "1"}), TypeError, "'offset' takes a float, got str"),
    ((8, {"rounding": "Late"}), ValueError, "'rounding' takes .*, got 'Late'"),
)

# Of a module's forward, with torch.nn's.
FORWARD = (
    ((None,), "'input' takes a Tensor, got NoneType"),
    ((X.int(),), "'input' takes float16, .*, got torch.int32"),
    ((X[:, :7],), r"'input' takes .* \[8\], got \[3, 7\]"),
)

# Attributes of a module that someone set, with torch.nn's.
SET = (
    ({"eps": "1"}, "'eps' takes a float.*, got str"),
    ({"weight": nn.Parameter(W[:7])}, r"'weight' takes .*, got \[7\]"),
    ({"normalized_shape": (7,)}, r"'input' takes .* \[7\], got \[3, 8\]"),
)


def plus(x):
    return x + 1


MODE_AND_OPTIONS = "(Either mode or options|'mode' takes None beside options, got 'default')"
# Of tilenorm.compile, with torch.compile's.
COMPILED = (
    ((3,), "callable function is expected, but .*int.* is provided"),
    ((plus, {"mode": "mine"}), "mode=mine, should be one of: default"),
    ((plus, {"options": {"mine": 1}}), "option mine, known options are"),
    ((plus, {"mode": "default", "options": {"max_autotune": True}}), MODE_AND_OPTIONS),
    ((plus, {"backend": "nonsense"}), "backend: 'nonsense'.*list_backends"),
    ((plus, {"dynamic": "yes"}), r"to be a bool, got .*str|^$"),
)


def model():
    return nn.Sequential(nn.LayerNorm(8))


MODEL, PATCHED, LINEAR = model(), model(), nn.Linear(2, 2)
tilenorm.patch(PATCHED)
GRAPH = symbolic_trace(plus)
A_MODEL, A_GRAPH = "'model' takes .*, got ", "'graph_module' takes a GraphModule, got "
A_WHERE = "'where' takes .*, got str"
LOW_ALONE = "'memory' takes 'low' with backend 'inductor' alone, got .*'eager'"
# Of what PyTorch has no counterpart of: the function, a right call, and the wrong ones.
INTEGRATIONS = (
    (
        tilenorm.patch,
        lambda: len(tilenorm.patch(model()).patched),
        ((3,), TypeError, A_MODEL + "int"),
        ((nn.Linear,), TypeError, A_MODEL + "type"),
        ((MODEL, {"where": "0"}), TypeError, A_WHERE),
        ((MODEL, {"residual": 1}), TypeError, "takes a bool, got int"),
        ((PATCHED,), RuntimeError, "0 is already patched; tilenorm.unpatch"),
    ),
    (
        tilenorm.unpatch,
        lambda: tilenorm.unpatch(MODEL),
        ((nn.LayerNorm,), TypeError, A_MODEL + "type"),
    ),
    (
        tilenorm.compile,
        lambda: callable(tilenorm.compile(plus)),
        ((plus, {"where": "norm"}), TypeError, A_WHERE),
        ((plus, {"options": [1]}), TypeError, "'options' takes .* got list"),
        ((plus, {"rotation": 1}), TypeError, "takes a bool, got int"),
        ((plus, {"memory": "high"}), ValueError, "'memory' takes 'low' or None, got 'high'"),
        ((plus, {"memory": "low", "backend": "eager"}), ValueError, LOW_ALONE),
    ),
    (
        replace_norms,
        lambda: replace_norms(GRAPH).left,
        ((LINEAR,), TypeError, A_GRAPH + "Linear"),
        ((GRAPH, {"fold": "all"}), TypeError, "'fold' takes a bool, got str"),
        ((GRAPH, {"where": "norm"}), TypeError, A_WHERE),
    ),
    (
        tilenorm.explain,
        lambda: tilenorm.explain("rms_norm", X, (8,)).chosen,
        (("softmax",), ValueError, "'op' takes one of .*, got 'softmax'"),
        (("rms_norm", X, (8,), {"epsilon": 1.0}), TypeError, "unexpected .* 'epsilon'"),
    ),
)


def named(wrong: list[Wrong]) -> dict[str, Wrong]:
    return {f"{number}: {w.message}": w for number, w in enumerate(wrong)}


def of_modules() -> Iterator[tuple[str, Function]]:
    """Each module, by its name, and its forward."""
    for name in ("RMSNorm", "LayerNorm"):
        kinds = ours, _ = getattr(tilenorm, name), getattr(nn, name)
        made = [_pair(kinds, *row) for row in MADE] + [_alone(ours, *row) for row in MADE_ALONE]
        yield name, Function(lambda ours=ours: ours(8)(X), named(made))
        modules = [kind(8) for kind in kinds]
        called = [_pair(modules, *row) for row in FORWARD]
        for attributes, message in SET:
            changed = [_with_attributes(kind(8), attributes) for kind in kinds]
            called.append(_pair(changed, (X,), message))
        yield f"{name}(8)", Function(lambda module=modules[0]: module(X), named(called))


def of_integrations() -> Iterator[tuple[str, Function]]:
    """Each integration, by its name."""
    for function, right, *rows in INTEGRATIONS:
        wrong = [_alone(function, *row) for row in rows]
        if function is tilenorm.compile:
            wrong += [_pair((function, torch.compile), *row) for row in COMPILED]
        yield function.__name__, Function(right, named(wrong))


def _alone(function: Callable, arguments: tuple, kind: type[Exception], message: str) -> Wrong:
    return Wrong(with_keywords(function, arguments), message, kind)


def _pair(functions: Sequence[Callable], arguments: tuple, message: str) -> Wrong:
    """Our call, and PyTorch's call with the same arguments."""
    ours, theirs = (with_keywords(function, arguments) for function in functions)
    return Wrong(ours, message, theirs)


def _with_attributes(module: nn.Module, attributes: dict) -> nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
