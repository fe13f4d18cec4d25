"""A table of wrong calls of the functions."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

import tilenorm
from tilenorm.table import NORMS

from .helpers import FAMILY, Form, arguments_of

X, W, HEADS, TWO_HEADS = torch.ones(3, 8), torch.ones(8), torch.ones(3, 8), torch.ones(2, 8)
FLOAT8 = X.to(torch.float8_e4m3fn)
SPARSE, MASK = X.to_sparse(), X > 0
HUGE = 10**400
NOT_SERVED = NotImplementedError
BY_HEADS = r"'weight' takes .* normalized_shape \[8\] or, by heads, \[3, 8\], got \[2, 8\]"


class Wrong(NamedTuple):
    """A wrong call.

    call: makes the call. message: a pattern of what the exception has to say, which is the
    argument, what it takes and what it got. expected: PyTorch's own call with the same arguments,
    which raises the exception that the call has to raise; or this exception's type where PyTorch
    has no such function. right: a right call of the same function, and its result. explained: the
    call of `explain` with the same arguments, if it has to raise the same.
    """

    call: Callable[[], object]
    message: str
    expected: Callable[[], object] | type[Exception]
    right: Callable[[], object]
    explained: Callable[[], object] | None = None


# Of F.rms_norm and F.layer_norm.
BY_PYTORCH = {
    "input a list": (([1.0], (8,)), r"'input' takes a Tensor, got list"),
    # A class that has __torch_function__: these are PyTorch's own words.
    "input a class": ((torch.Tensor, (8,)), r"no implementation found for '.*_norm'"),
    "input of ints": ((X.int(), (8,)), r"'input' takes float16, .*, got torch.int32"),
    "input in float8": ((FLOAT8, (8,)), r"'input' takes float16, .*, got torch.float8_e4m3fn"),
    "input sparse": ((SPARSE, (8,)), r"'input' takes the layout .*, got torch.sparse_coo"),
    "input of another size": ((X, (7,)), r"'input' takes .* \[7\], got \[3, 8\]"),
    "input of another first size": ((X, (4, 8)), r"'input' takes .* \[4, 8\], got \[3, 8\]"),
    "input a scalar": ((X[0, 0], (1,)), r"'input' takes at least the 1 dimensions .*, got 0"),
    "input a matrix": ((X, (2, 3, 8)), r"'input' takes at least the 3 dimensions .*, got 2"),
    "input elsewhere": ((X.to("meta"), (8,), W), r"'weight' takes .* device meta, got cpu"),
    "shape a bool": ((X, True), r"'normalized_shape' takes a tuple of ints, got bool"),
    "shape a set": ((X, {8}), r"'normalized_shape' takes a tuple of ints, got set"),
    "shape a tensor": ((X, W.int()), r"'normalized_shape' takes a tuple of ints, got Tensor"),
    "shape of floats": ((X, (8.0,)), r"'normalized_shape' takes a tuple of ints, got \(8\.0,\)"),
    "shape of bools": ((X[:, :1], (True,)), r"'normalized_shape' takes .*, got \(True,\)"),
    "shape of float tensors": ((X, (W[0],)), r"'normalized_shape' takes .*, got \(tensor"),
    "shape beyond 64 bits": ((X, (2**70,)), r"'normalized_shape' takes .*, got \(1180591"),
    "shape empty": ((X, ()), r"'normalized_shape' takes at least one size, got \(\)"),
    "shape negative": ((X, (-1,)), r"'input' takes .* \[-1\], got \[3, 8\]"),
    "weight a list": ((X, (8,), [1.0] * 8), r"'weight' takes a Tensor or None, got list"),
    "weight of another size": ((X, (8,), W[:7]), r"'weight' takes .* \[8\].*, got \[7\]"),
    "weight of another rank": ((X, (8,), W[None]), r"'weight' takes .* \[8\].*, got \[1, 8\]"),
    "weight sparse": ((X, (8,), W.to_sparse()), r"'weight' takes the layout .*sparse_coo"),
    "weight in float8": ((X, (8,), FLOAT8[0]), r"'weight' takes .*, got torch.float8_e4m3fn"),
    "weight elsewhere": ((X, (8,), W.to("meta")), r"'weight' takes .* device cpu, got meta"),
    "eps a vector": ((X, (8,), {"eps": W[:1]}), r"'eps' takes a float.*, got"),
    "eps of a graph": ((X, (8,), {"eps": torch.ones((), requires_grad=True)}), r"eps"),
    "eps beyond floats": ((X, (8,), {"eps": HUGE}), r"'eps' takes .* no float holds"),
    "no arguments": ((), "missing .*'input' and 'normalized_shape'"),
    "no shape": ((X,), "missing .*'normalized_shape'"),
    "unknown keyword": ((X, (8,), {"epsilon": 1.0}), "unexpected keyword argument 'epsilon'"),
    "input twice": ((X, (8,), {"input": X}), "multiple values for argument 'input'"),
    "too many arguments": ((X, (8,), W, None, 1.0, 2, 3), "takes .* positional"),
}

# Of F.layer_norm alone.
LAYER_NORM = {
    "bias complex": ((X, (8,), W, W + 0j), r"'bias' takes float16, .*, got torch.complex64"),
    "eps None": ((X, (8,), {"eps": None}), r"'eps' takes a float, got NoneType"),
}

# Of every function: what PyTorch's does not take, or casts, or, with a residual or a gate, lacks.
EVERY = {
    "input None": ({"input": None}, TypeError, "'input' takes a Tensor, got NoneType"),
    "input complex": ({"input": X + 0j}, NOT_SERVED, "'input' takes float16, .*complex64"),
    "shape an int": ({"normalized_shape": 8}, TypeError, "'normalized_shape' takes .* got int"),
    "eps a string": ({"eps": "1"}, TypeError, "'eps' takes a float.*, got str"),
    "eps a complex tensor": ({"eps": torch.tensor(1j)}, TypeError, "'eps' takes a float"),
    "bias a list": ({"bias": [1.0]}, TypeError, "'bias' takes a Tensor or None, got list"),
    "bias of another size": ({"bias": W[:7]}, RuntimeError, r"'bias' takes .* \[8\].*, got \[7\]"),
    "bias elsewhere": ({"bias": W.to("meta")}, RuntimeError, "'bias' takes .* cpu, got meta"),
    "bias of ints": ({"bias": W.int()}, NOT_SERVED, "'bias' takes .* got torch.int32"),
    "weight of ints": ({"weight": W.int()}, NOT_SERVED, "'weight' takes .* got torch.int32"),
    "weight complex": ({"weight": W + 0j}, NOT_SERVED, "'weight' takes .* got torch.complex64"),
    "weight by heads": ({"weight": TWO_HEADS}, RuntimeError, BY_HEADS),
    "weight by heads, bias not": (
        {"weight": HEADS},
        RuntimeError,
        r"'bias' takes the shape of weight \[3, 8\], got \[8\]",
    ),
    "bias by heads, weight not": (
        {"bias": HEADS},
        RuntimeError,
        r"'bias' takes the shape of weight \[8\], got \[3, 8\]",
    ),
    "offset a string": ({"offset": "1"}, TypeError, "'offset' takes a float, got str"),
    "offset None": ({"offset": None}, TypeError, "'offset' takes a float, got NoneType"),
    "offset a tensor": ({"offset": W[0]}, TypeError, "'offset' takes a float, got Tensor"),
    "offset beyond floats": (
        {"offset": HUGE},
        OverflowError,
        "'offset' takes a float, got .*holds",
    ),
    "rounding None": ({"rounding": None}, ValueError, "'rounding' takes 'late' or .*, got None"),
    "rounding unknown": ({"rounding": "Early"}, ValueError, "'rounding' takes .*, got 'Early'"),
    "rounding an array": ({"rounding": W.numpy()}, ValueError, "'rounding' takes .*, got array"),
    "backend an int": ({"backend": 3}, TypeError, "'backend' takes a str or None, got int"),
    "backend unknown": ({"backend": "triton"}, ValueError, "backend: got 'triton', takes one of"),
}

# Of the functions with a residual or a gate.
OF_THE_OTHER = {
    "None": (None, TypeError, "takes a Tensor, got NoneType"),
    "a list": ([1.0], TypeError, r"takes a Tensor.*, got (list|\[float\])"),
    "another size": (X[:2], RuntimeError, r"takes the input's shape \[3, 8\], got \[2, 8\]"),
    "one that would broadcast": (W, RuntimeError, r"takes the input's shape \[3, 8\], got \[8\]"),
    "ints": (X.int(), NOT_SERVED, "takes float16, .* got torch.int32"),
    "sparse": (SPARSE, NOT_SERVED, "takes the layout .* got torch.sparse_coo"),
    "elsewhere": (X.to("meta"), RuntimeError, "takes the input's device cpu, got meta"),
}

# Of the functions with a gate.
GATED = {
    "activation unknown": ({"activation": "relu"}, ValueError, "'activation' takes .*'relu'"),
    "activation None": ({"activation": None}, ValueError, "'activation' takes .* got None"),
    "order an int": (
        {"norm_before_gate": 1},
        TypeError,
        "'norm_before_gate' takes a bool, got int",
    ),
    "order a tensor": ({"norm_before_gate": X}, TypeError, "'norm_before_gate' .* got Tensor"),
}


# Of the functions that normalise the sum with a residual.
ADDED = {
    "three residuals": ({"residual": (X, X, X)}, TypeError, "takes .* one or two Tensors, got"),
    "no residuals": ({"residual": ()}, TypeError, r"takes .* one or two Tensors, got \[\]"),
    "residuals with a number": ({"residual": (1.0, X)}, TypeError, r"got \[float, Tensor\]"),
    "a first residual of a third dtype": (
        {"residual": (X.half(), X.bfloat16())},
        RuntimeError,
        r"'residual\[0\]' takes the dtype of the input or of residual\[1\],"
        " torch.float32 or torch.bfloat16, got torch.float16",
    ),
    "a shorter first residual": ({"residual": (X[:2], X)}, RuntimeError, r"'residual\[0\]' takes"),
    "a shorter last residual": ({"residual": (X, X[:2])}, RuntimeError, r"'residual\[1\]' takes"),
    "a first residual of ints": ({"residual": (X.int(), X)}, NOT_SERVED, r"'residual\[0\]' takes"),
    "mask absent": ({"dropout_scale": 2.0}, ValueError, "'dropout_scale' takes 1.0 without"),
    "mask scaled by a string": (
        {"dropout_mask": MASK, "dropout_scale": "2"},
        TypeError,
        "'dropout_scale' takes",
    ),
    "mask a list": ({"dropout_mask": [True]}, TypeError, "'dropout_mask' takes a Tensor or None"),
    "mask of floats": ({"dropout_mask": X}, NOT_SERVED, "'dropout_mask' takes torch.bool, got"),
    "mask shorter": ({"dropout_mask": MASK[:2]}, RuntimeError, r"takes the input's shape \[3, 8\]"),
    "mask elsewhere": ({"dropout_mask": MASK.to("meta")}, RuntimeError, "takes the input's device"),
    "layer_scale shorter": ({"layer_scale": W[:7]}, RuntimeError, r"takes the shape .*\[7\]"),
    "layer_scale of rows": ({"layer_scale": X}, RuntimeError, "'layer_scale' takes the shape of"),
    "layer_scale of ints": ({"layer_scale": W.int()}, NOT_SERVED, "'layer_scale' takes float16"),
    "layer_scale and fewer digits": (
        {"residual": X.half(), "layer_scale": W},
        RuntimeError,
        "'residual' takes at least the digits",
    ),
    "layer_scale and two residuals": (
        {"residual": (X, X), "layer_scale": W},
        RuntimeError,
        "'layer_scale' takes None with two residuals",
    ),
}

# Of rms_norm_add_rms_norm.
CHAIN = {
    "residual None": ({"residual": None}, TypeError, "'residual' takes a Tensor, got NoneType"),
    "residual shorter": ({"residual": X[:2]}, RuntimeError, "'residual' takes the input's shape"),
    "residual of ints": ({"residual": X.int()}, NOT_SERVED, "'residual' takes float16"),
    "weight shorter": ({"weight": W[:7]}, RuntimeError, "'weight' takes the shape"),
    "next_weight shorter": ({"next_weight": W[:7]}, RuntimeError, "'next_weight' takes the shape"),
    "eps a string": ({"eps": "1"}, TypeError, "'eps' takes a float"),
    "rounding unknown": ({"rounding": "up"}, ValueError, "'rounding' takes"),
}

# Of the quantised functions.
WIDE = torch.ones(3, 128)
NESTED = torch.nested.nested_tensor([WIDE, WIDE], layout=torch.jagged)
ROW, TENSOR = {"scaling": "row"}, {"scaling": "tensor"}
QUANTIZED = {
    "scaling unknown": ({"scaling": "column"}, ValueError, "'scaling' takes 'row' or .*'column'"),
    "scaling a number": ({"scaling": 1}, ValueError, "'scaling' takes 'row' or .*, got 1"),
    "dtype of 16 bits": (
        ROW | {"dtype": torch.float16},
        NOT_SERVED,
        "'dtype' takes torch.float8_e4m3fn or torch.float8_e5m2, got torch.float16",
    ),
    "layout of another scaling": (
        ROW | {"layout": "swizzled"},
        ValueError,
        "'layout' takes 'row' with scaling='row', got 'swizzled'",
    ),
    "powers of two twice": (
        {"scaling": "mx", "power_of_2": True},
        ValueError,
        "'power_of_2' takes no True with scaling='mx': its scales are powers of two always",
    ),
    "a number for a flag": (ROW | {"return_amax": 1}, TypeError, "'return_amax' takes a bool, got"),
    "scale of rows given": (ROW | {"scale": W[:1]}, ValueError, "'scale' takes None with scaling="),
    "no scale": (TENSOR, TypeError, "'scale' takes a Tensor of one float32 .*, got NoneType"),
    "scales": (TENSOR | {"scale": W}, RuntimeError, r"'scale' takes one torch.float32 on cpu, got"),
    "weight by heads": (ROW | {"weight": WIDE[:2]}, RuntimeError, "'weight' takes the shape of"),
    "backend unknown": (ROW | {"backend": "tile"}, ValueError, "backend: got 'tile', takes one of"),
    "nested": (ROW | {"input": NESTED}, NOT_SERVED, "'input' takes no nested tensor"),
} | {
    f"{scaling}s in part": (
        {"scaling": scaling, "input": WIDE[:, :120], "normalized_shape": (120,)},
        RuntimeError,
        f"takes a multiple of {group} elements with scaling='{scaling}', got 120",
    )
    for scaling, group in (("block", 128), ("mx", 32))
}


def with_keywords(function: Callable, arguments: tuple) -> Callable[[], object]:
    """A call. A dict of names at the end of the arguments holds keyword arguments."""
    keywords = {}
    if arguments and isinstance(arguments[-1], dict) and str in map(type, arguments[-1]):
        *arguments, keywords = arguments
    return lambda: function(*arguments, **keywords)


def given(form: Form) -> dict[str, object]:
    """Right arguments of a function."""
    tensors = {name: X if name in ("input", form.other) else W for name in form.names}
    return {**arguments_of(tensors), "normalized_shape": (8,), **form.options}


def wrong_of(form: Form) -> dict[str, tuple]:
    """Wrong arguments of a function that PyTorch does not have."""
    rows = EVERY | (GATED if form.other == "gate" else {})
    rows |= ADDED if form.other == "residual" else {}
    if form.other:
        name = form.argument
        rows |= {
            f"{name} {what}": ({name: value}, kind, f"'{name}' {message}")
            for what, (value, kind, message) in OF_THE_OTHER.items()
        }
    return rows


def of_functions() -> Iterator[tuple[str, Wrong]]:
    """Every wrong call of a function, with its name."""
    for op in ("rms_norm", "layer_norm"):
        rows = BY_PYTORCH | (LAYER_NORM if op == "layer_norm" else {})
        right = with_keywords(getattr(tilenorm, op), (given(FAMILY[op]),))
        for name, (arguments, message) in rows.items():
            calls = [with_keywords(getattr(f, op), arguments) for f in (tilenorm, F)]
            # Where the arguments do not fit the signature the message is Python's own.
            explained = with_keywords(tilenorm.explain, (op, *arguments))
            explained = explained if message.startswith("'") else None
            yield f"{op}, {name}", Wrong(calls[0], message, calls[1], right, explained)
    chain = {"input": X, "residual": X, "normalized_shape": (8,), "weight": W, "next_weight": W}
    wide = {"input": WIDE, "normalized_shape": (128,)}
    tables = [(name, form.op, given(form), {}, wrong_of(form)) for name, form in FAMILY.items()]
    tables.append(("rms_norm_add_rms_norm", "rms_norm_add_rms_norm", chain, {}, CHAIN))
    tables.append(("rms_norm_quantized", "rms_norm_quantized", wide, ROW, QUANTIZED))
    for name, op, arguments, others, rows in tables:
        function = getattr(tilenorm, op)
        right = with_keywords(function, (arguments | others,))
        for what, (wrong, kind, message) in rows.items():
            call = with_keywords(function, (arguments | wrong,))
            explained = with_keywords(tilenorm.explain, (op, arguments | wrong))
            explained = explained if op in NORMS and what != "backend unknown" else None
            yield f"{name}: {what}", Wrong(call, message, kind, right, explained)
