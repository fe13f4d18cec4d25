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
    "shape a float": ((8.0,), r"'normalized_shape' takes an int or .*, got float"),
    "shape a bool": ((True,), r"'normalized_shape' takes an int or .*, got bool"),
    "shape a string": (("8",), r"'normalized_shape' takes an int or .*, got \('8',\)"),
    "shape of floats": (((8.0,),), r"'normalized_shape' takes an int or .*, got \(8\.0,\)"),
    "shape of lists": (([[8]],), r"'normalized_shape' takes an int or .*, got \(\[8\],\)"),
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
    "input a list": (([1.0],), r"'input' takes a Tensor, got list"),
    "input of ints": ((X.int(),), r"'input' takes float16, .*, got torch.int32"),
    "input of another size": ((X[:, :7],), r"'input' takes .* \[8\], got \[3, 7\]"),
    "input a scalar": ((X[0, 0],), r"'input' takes at least the 1 dimensions .*, got 0"),
    "no input": ((), "missing 1 required positional argument: '(x|input)'"),
    "two inputs": ((X, X), "takes 2 positional arguments but 3 were given"),
}

# Attributes of a module that someone set, with torch.nn's.
SET = {
    "eps a string": ({"eps": "1"}, r"'eps' takes a float.*, got str"),
    "eps a list": ({"eps": [1.0]}, r"'eps' takes a float.*, got list"),
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
# Of what PyTorch has no counterpart of: the call, the exception, its message, and a right call.
INTEGRATIONS = {
    "patch": (
        lambda: len(tilenorm.patch(model()).patched),
        {
            "model an int": (lambda: tilenorm.patch(3), TypeError, "'model' takes .*, got int"),
            "model a class": (
                lambda: tilenorm.patch(nn.Linear),
                *(TypeError, "'model' takes .*, got type"),
            ),
            "no model": (lambda: tilenorm.patch(), TypeError, "missing .* 'model'"),
            "where a string": (
                lambda: tilenorm.patch(MODEL, where="0"),
                *(TypeError, "'where' takes a function or None, got str"),
            ),
            "where by position": (
                lambda: tilenorm.patch(MODEL, plus),
                *(TypeError, "takes 1 positional"),
            ),
            "model patched": (
                lambda: tilenorm.patch(PATCHED),
                *(RuntimeError, "0 is already patched; tilenorm.unpatch"),
            ),
        },
    ),
    "compile": (
        lambda: callable(tilenorm.compile(plus)),
        {
            "where a string": (
                lambda: tilenorm.compile(plus, where="norm"),
                *(TypeError, "'where' takes a function of a node, got str"),
            ),
            "options a list": (
                lambda: tilenorm.compile(plus, options=[1]),
                *(TypeError, "'options' takes a dict or None, got list"),
            ),
            "memory another word": (
                lambda: tilenorm.compile(plus, memory="high"),
                *(ValueError, "'memory' takes 'low' or None, got 'high'"),
            ),
            "memory with another backend": (
                lambda: tilenorm.compile(plus, memory="low", backend="eager"),
                *(ValueError, "'memory' takes 'low' with backend 'inductor' alone, got .*'eager'"),
            ),
        },
    ),
    "replace_norms": (
        lambda: replace_norms(GRAPH).left,
        {
            "graph_module a module": (
                lambda: replace_norms(LINEAR),
                *(TypeError, "'graph_module' takes a GraphModule, got Linear"),
            ),
            "graph_module a graph": (
                lambda: replace_norms(GRAPH.graph),
                *(TypeError, "'graph_module' takes a GraphModule, got Graph"),
            ),
            "graph_module None": (
                lambda: replace_norms(None),
                *(TypeError, "'graph_module' takes a GraphModule, got NoneType"),
            ),
            "fold a string": (
                lambda: replace_norms(GRAPH, fold="all"),
                *(TypeError, "'fold' takes a bool, got str"),
            ),
            "where a string": (
                lambda: replace_norms(GRAPH, where="norm"),
                *(TypeError, "'where' takes a function of a node, got str"),
            ),
        },
    ),
    "override": (
        lambda: tilenorm.disable(),
        {
            "an argument": (lambda: tilenorm.override(1), TypeError, "takes 0 positional"),
            "enable with one": (lambda: tilenorm.enable("cuda"), TypeError, "takes 0 positional"),
            "disable with one": (lambda: tilenorm.disable(1), TypeError, "takes 0 positional"),
        },
    ),
    "explain": (
        lambda: tilenorm.explain("rms_norm", X, (8,)).chosen,
        {
            "op unknown": (
                lambda: tilenorm.explain("softmax"),
                *(ValueError, "'op' takes one of rms_norm, .*, got 'softmax'"),
            ),
            "op a list": (
                lambda: tilenorm.explain([]),
                *(ValueError, r"'op' takes one of rms_norm, .*, got \[\]"),
            ),
            "no op": (lambda: tilenorm.explain(), TypeError, "missing .* 'op'"),
            "no shape": (
                lambda: tilenorm.explain("rms_norm", X),
                *(TypeError, "missing .* 'normalized_shape'"),
            ),
            "unknown keyword": (
                lambda: tilenorm.explain("rms_norm", X, (8,), epsilon=1.0),
                *(TypeError, "unexpected keyword argument 'epsilon'"),
            ),
            "norm_before_gate a string": (
                lambda: tilenorm.explain("gated_rms_norm", X, X, (8,), norm_before_gate="no"),
                *(TypeError, "'norm_before_gate' takes a bool, got str"),
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
        right, _ = INTEGRATIONS["compile"]
        yield f"compile, {name}", Wrong(calls[0], message, calls[1], right)
    for function, (right, rows) in INTEGRATIONS.items():
        for name, (wrong, kind, message) in rows.items():
            yield f"{function}, {name}", Wrong(wrong, message, kind, right)


def _with_attributes(module: nn.Module, attributes: dict) -> Callable[[], object]:
    for name, value in attributes.items():
        setattr(module, name, value)
    return lambda: module(X)
