"""A table of wrong calls of the modules and the integrations."""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.fx import symbolic_trace

import tilenorm
from tilenorm.integrations.fx import replace_norms

from .wrong_calls import W, Wrong, X, with_keywords

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
ALONE = "takes 0 positional"
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
    "override": (tilenorm.disable, tilenorm.override, {"an argument": ((1,), TypeError, ALONE)}),
    "enable": (tilenorm.disable, tilenorm.enable, {"an argument": ((1,), TypeError, ALONE)}),
    "disable": (tilenorm.disable, tilenorm.disable, {"an argument": ((1,), TypeError, ALONE)}),
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


def of_modules() -> Iterator[tuple[str, Wrong]]:
    """Every wrong call of a module, with its name."""
    for name in ("RMSNorm", "LayerNorm"):
        ours, theirs = getattr(tilenorm, name), getattr(nn, name)
        module, other = ours(8), theirs(8)

        def right(ours=ours):
            return ours(8)(X)

        for what, (arguments, message) in MADE.items():
            calls = [with_keywords(cls, arguments) for cls in (ours, theirs)]
            yield f"{name}, {what}", Wrong(calls[0], message, calls[1], right)
        for what, (wrong, kind, message) in MADE_ALONE.items():
            call = with_keywords(ours, (8, wrong))
            yield f"{name}, {what}", Wrong(call, message, kind, right)
        for what, (arguments, message) in FORWARD.items():
            calls = [with_keywords(m, arguments) for m in (module, other)]
            yield f"{name}(8), {what}", Wrong(calls[0], message, calls[1], lambda m=module: m(X))
        for what, (attributes, message) in SET.items():
            calls = [_with_attributes(cls(8), attributes) for cls in (ours, theirs)]
            yield f"{name} with {what}", Wrong(calls[0], message, calls[1], right)


def of_integrations() -> Iterator[tuple[str, Wrong]]:
    """Every wrong call of an integration, with its name."""
    for name, (arguments, message) in COMPILED.items():
        calls = [with_keywords(c.compile, arguments) for c in (tilenorm, torch)]
        right = INTEGRATIONS["compile"][0]
        yield f"compile, {name}", Wrong(calls[0], message, calls[1], right)
    for name, (right, function, rows) in INTEGRATIONS.items():
        for what, (arguments, kind, message) in rows.items():
            yield f"{name}, {what}", Wrong(with_keywords(function, arguments), message, kind, right)


def _with_attributes(module: nn.Module, attributes: dict) -> Callable[[], object]:
    for name, value in attributes.items():
        setattr(module, name, value)
    return lambda: module(X)
