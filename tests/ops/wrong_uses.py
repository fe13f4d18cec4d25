"""A table of wrong calls of the modules and the integrations."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.fx import symbolic_trace

import tilenorm
from tilenorm.integrations.fx import replace_norms

from .wrong_calls import Function, W, Wrong, X, with_keywords

# Of the modules' constructors, with torch.nn's.
MADE = {
    "shape None": ((None,), r"'normalized_shape' takes an int or .*, got NoneType"),
    "shape a string": (("8",), r"'normalized_shape' takes an int or .*, got \('8',\)"),
    "shape of floats": (((8.0,),), r"'normalized_shape' takes an int or .*, got \(8\.0,\)"),
    "shape negative": ((-1,), r"'normalized_shape' takes .* from 0 on, got \(-1,\)"),
    "shape beyond 64 bits": ((2**70,), r"'normalized_shape' takes .* ints.*, got \(1180591"),
    "no shape": ((), "missing .* 'normalized_shape'"),
    "dtype a string": ((8, {"dtype": "float32"}), r"'dtype' takes a torch.dtype .*, got str"),
    "dtype of ints": ((8, {"dtype": torch.int32}), r"'dtype' takes a floating.*, got torch.int32"),
    "device unknown": ((8, {"device": "nowhere"}), r"one of cpu, cuda.* device string: nowhere"),
    "device a list": ((8, {"device": []}), r"device'? ?(must be torch.device, not |=)list"),
    "unknown keyword": ((8, {"epsilon": 1.0}), "unexpected keyword argument 'epsilon'"),
}

# Of the modules' constructors alone.
MADE_ALONE = {
    "offset a string": ({"offset": "1"}, TypeError, r"'offset' takes a float, got str"),
    "offset None": ({"offset": None}, TypeError, r"'offset' takes a float, got NoneType"),
    "rounding unknown": ({"rounding": "Late"}, ValueError, r"'rounding' takes .*, got 'Late'"),
    "rounding None": ({"rounding": None}, ValueError, r"'rounding' takes .*, got None"),
}

# Of a module's forward, with torch.nn's.
FORWARD = {
    "input None": ((None,), r"'input' takes a Tensor, got NoneType"),
    "input of ints": ((X.int(),), r"'input' takes float16, .*, got torch.int32"),
    "input of another size": ((X[:, :7],), r"'input' takes .* \[8\], got \[3, 7\]"),
    "no input": ((), "missing 1 required positional argument: '(x|input)'"),
    "two inputs": ((X, X), "takes 2 positional arguments but 3 were given"),
}

# Attributes of a module that someone set, with torch.nn's.
SET = {
    "eps a string": ({"eps": "1"}, r"'eps' takes a float.*, got str"),
    "weight of another size": ({"weight": nn.Parameter(W[:7])}, r"'weight' takes .*, got \[7\]"),
    "shape of another size": ({"normalized_shape": (7,)}, r"'input' takes .* \[7\], got \[3, 8\]"),
}


def plus(x):
    return x + 1


# Of tilenorm.compile, with torch.compile's.
COMPILED = {
    "model an int": ((3,), "callable function is expected, but .*int.* is provided"),
    "mode unknown": ((plus, {"mode": "mine"}), "mode=mine, should be one of: default"),
    "option unknown": ((plus, {"options": {"mine": 1}}), "option mine, known options are"),
    "mode and options": (
        (plus, {"mode": "default", "options": {"max_autotune": True}}),
        "(Either mode or options|'mode' takes None beside options, got 'default')",
    ),
    "backend unknown": ((plus, {"backend": "nonsense"}), "backend: 'nonsense'.*list_backends"),
    "dynamic a string": ((plus, {"dynamic": "yes"}), r"to be a bool, got .*str|^$"),
    "unknown keyword": ((plus, {"where_": 1}), "unexpected keyword argument 'where_'"),
}


def model():
    return nn.Sequential(nn.LayerNorm(8))


MODEL, PATCHED, LINEAR = model(), model(), nn.Linear(2, 2)
tilenorm.patch(PATCHED)
GRAPH = symbolic_trace(plus)
A_MODEL, A_GRAPH = "'model' takes .*, got ", "'graph_module' takes a GraphModule, got "
LOW_ALONE = "'memory' takes 'low' with backend 'inductor' alone, got .*'eager'"
# Of what PyTorch has no counterpart of: a right call, the function, and of each wrong call its
# arguments, the exception and the message.
INTEGRATIONS = {
    "patch": (
        lambda: len(tilenorm.patch(model()).patched),
        tilenorm.patch,
        {
            "model an int": ((3,), TypeError, A_MODEL + "int"),
            "model a class": ((nn.Linear,), TypeError, A_MODEL + "type"),
            "no model": ((), TypeError, "missing .* 'model'"),
            "where a string": ((MODEL, {"where": "0"}), TypeError, "'where' takes .*, got str"),
            "where by position": ((MODEL, plus), TypeError, "takes 1 positional"),
            "residual an int": ((MODEL, {"residual": 1}), TypeError, "takes a bool, got int"),
            "model patched": ((PATCHED,), RuntimeError, "0 is already patched; tilenorm.unpatch"),
        },
    ),
    "unpatch": (
        lambda: tilenorm.unpatch(MODEL),
        tilenorm.unpatch,
        {"model a class": ((nn.LayerNorm,), TypeError, A_MODEL + "type")},
    ),
    "compile": (
        lambda: callable(tilenorm.compile(plus)),
        tilenorm.compile,
        {
            "where a string": ((plus, {"where": "norm"}), TypeError, "'where' takes .*, got str"),
            "options a list": ((plus, {"options": [1]}), TypeError, "'options' takes .* got list"),
            "rotation an int": ((plus, {"rotation": 1}), TypeError, "takes a bool, got int"),
            "memory another word": (
                (plus, {"memory": "high"}),
                ValueError,
                "'memory' takes 'low' or None, got 'high'",
            ),
            "memory with another backend": (
                (plus, {"memory": "low", "backend": "eager"}),
                ValueError,
                LOW_ALONE,
            ),
        },
    ),
    "replace_norms": (
        lambda: replace_norms(GRAPH).left,
        replace_norms,
        {
            "graph_module a module": ((LINEAR,), TypeError, A_GRAPH + "Linear"),
            "graph_module a graph": ((GRAPH.graph,), TypeError, A_GRAPH + "Graph"),
            "graph_module None": ((None,), TypeError, A_GRAPH + "NoneType"),
            "fold a string": ((GRAPH, {"fold": "all"}), TypeError, "'fold' takes a bool, got str"),
            "where a string": ((GRAPH, {"where": "norm"}), TypeError, "'where' takes .*, got str"),
        },
    ),
    "explain": (
        lambda: tilenorm.explain("rms_norm", X, (8,)).chosen,
        tilenorm.explain,
        {
            "op unknown": (("softmax",), ValueError, "'op' takes one of .*, got 'softmax'"),
            "op a list": (([],), ValueError, r"'op' takes one of rms_norm, .*, got \[\]"),
            "no op": ((), TypeError, "missing .* 'op'"),
            "no shape": (("rms_norm", X), TypeError, "missing .* 'normalized_shape'"),
            "unknown keyword": (
                ("rms_norm", X, (8,), {"epsilon": 1.0}),
                TypeError,
                "unexpected keyword argument 'epsilon'",
            ),
        },
    ),
}


def of_modules() -> Iterator[tuple[str, Function]]:
    """Each module, by its name, and its forward."""
    for name in ("RMSNorm", "LayerNorm"):
        kinds = ours, theirs = getattr(tilenorm, name), getattr(nn, name)
        made, called = {}, {}
        for what, (arguments, message) in MADE.items():
            made[what] = Wrong(*_pair(kinds, arguments, message))
        for what, (wrong, kind, message) in MADE_ALONE.items():
            made[what] = Wrong(with_keywords(ours, (8, wrong)), message, kind)
        yield name, Function(lambda ours=ours: ours(8)(X), made)
        modules = ours(8), theirs(8)
        for what, (arguments, message) in FORWARD.items():
            called[what] = Wrong(*_pair(modules, arguments, message))
        for what, (attributes, message) in SET.items():
            called[what] = Wrong(
                *_pair([_with_attributes(k(8), attributes) for k in kinds], (X,), message)
            )
        yield f"{name}(8)", Function(lambda module=modules[0]: module(X), called)


def of_integrations() -> Iterator[tuple[str, Function]]:
    """Each integration, by its name."""
    for name, (right, function, rows) in INTEGRATIONS.items():
        wrong = {
            what: Wrong(with_keywords(function, arguments), message, kind)
            for what, (arguments, kind, message) in rows.items()
        }
        if name == "compile":
            both = tilenorm.compile, torch.compile
            wrong |= {what: Wrong(*_pair(both, *row)) for what, row in COMPILED.items()}
        yield name, Function(right, wrong)


def _pair(functions: Sequence[Callable], arguments: tuple, message: str) -> tuple:
    """What Wrong takes: our call, the message, and PyTorch's call with the same arguments."""
    ours, theirs = (with_keywords(function, arguments) for function in functions)
    return ours, message, theirs


def _with_attributes(module: nn.Module, attributes: dict) -> nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
