"""A table of wrong calls of the functions."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

import tilenorm

from .helpers import FAMILY, Form, arguments_of

X, W, HEADS, TWO_HEADS = torch.ones(3, 8), torch.ones(8), torch.ones(3, 8), torch.ones(2, 8)
FLOAT8 = X.to(torch.float8_e4m3fn)
SPARSE, CSR = X.to_sparse(), X.to_sparse_csr()
HUGE = 10**400
NOT_SERVED = NotImplementedError
BY_HEADS = r"'weight' takes .* normalized_shape \[8\] or, by heads, \[3, 8\], got \[2, 8\]"


class Wrong(NamedTuple):
    """A wrong call.

    call: makes the call. message: a pattern of what the exception has to say, which is the
    argument, what it takes and what it got. expected: PyTorch's own call with the same arguments,
    which raises the exception that the call has to raise; or this exception's type where PyTorch
    has no such function. right: a right call of the same function, and its result.
    """

    call: Callable[[], object]
    message: str
    expected: Callable[[], object] | type[Exception]
    right: Callable[[], object]


# Of F.rms_norm and F.layer_norm.
BY_PYTORCH = {
    "input a list": (([1.0], (8,)), r"'input' takes a Tensor, got list"),
    "input a list of tensors": (([X], (8,)), r"'input' takes a Tensor, got list"),
    "input None": ((None, (8,)), r"'input' takes a Tensor, got NoneType"),
    "input a number": ((1.5, (8,)), r"'input' takes a Tensor, got float"),
    "input an array": ((X.numpy(), (8,)), r"'input' takes a Tensor, got ndarray"),
    # A class that has __torch_function__: these are PyTorch's own words.
    "input a class": ((torch.Tensor, (8,)), r"no implementation found for '.*_norm'"),
    "input of ints": ((X.int(), (8,)), r"'input' takes float16, .*, got torch.int32"),
    "input of bytes": ((X.byte(), (8,)), r"'input' takes float16, .*, got torch.uint8"),
    "input of bools": ((X.bool(), (8,)), r"'input' takes float16, .*, got torch.bool"),
    "input in float8": ((FLOAT8, (8,)), r"'input' takes float16, .*, got torch.float8_e4m3fn"),
    "input sparse": ((SPARSE, (8,)), r"'input' takes the layout .*, got torch.sparse_coo"),
    "input in CSR": ((CSR, (8,)), r"'input' takes the layout .*, got torch.sparse_csr"),
    "input of another size": ((X, (7,)), r"'input' takes .* \[7\], got \[3, 8\]"),
    "input of another first size": ((X, (4, 8)), r"'input' takes .* \[4, 8\], got \[3, 8\]"),
    "input empty": ((X[:0, :0], (8,)), r"'input' takes .* \[8\], got \[0, 0\]"),
    "input a scalar": ((X[0, 0], (1,)), r"'input' takes at least the 1 dimensions .*, got 0"),
    "input a matrix": ((X, (2, 3, 8)), r"'input' takes at least the 3 dimensions .*, got 2"),
    "input elsewhere": ((X.to("meta"), (8,), W), r"'weight' takes .* device meta, got cpu"),
    "shape an int": ((X, 8), r"'normalized_shape' takes a tuple of ints, got int"),
    "shape a float": ((X, 8.0), r"'normalized_shape' takes a tuple of ints, got float"),
    "shape a bool": ((X, True), r"'normalized_shape' takes a tuple of ints, got bool"),
    "shape a string": ((X, "8"), r"'normalized_shape' takes a tuple of ints, got str"),
    "shape a dict": ((X, {8: 1}), r"'normalized_shape' takes a tuple of ints, got dict"),
    "shape a set": ((X, {8}), r"'normalized_shape' takes a tuple of ints, got set"),
    "shape a range": ((X, range(8, 9)), r"'normalized_shape' takes a tuple of ints, got range"),
    "shape None": ((X, None), r"'normalized_shape' takes a tuple of ints, got NoneType"),
    "shape a tensor": ((X, W.int()), r"'normalized_shape' takes a tuple of ints, got Tensor"),
    "shape of floats": ((X, (8.0,)), r"'normalized_shape' takes a tuple of ints, got \(8\.0,\)"),
    "shape of strings": ((X, ["8"]), r"'normalized_shape' takes a tuple of ints, got \('8',\)"),
    "shape of lists": ((X, [[8]]), r"'normalized_shape' takes a tuple of ints, got \(\[8\],\)"),
    "shape of None": ((X, (None,)), r"'normalized_shape' takes a tuple of ints, got \(None,\)"),
    "shape of bools": ((X[:, :1], (True,)), r"'normalized_shape' takes .*, got \(True,\)"),
    "shape of float tensors": ((X, (W[0],)), r"'normalized_shape' takes .*, got \(tensor"),
    "shape complex": ((X, (8j,)), r"'normalized_shape' takes a tuple of ints, got \(8j,\)"),
    "shape beyond 64 bits": ((X, (2**70,)), r"'normalized_shape' takes .*, got \(1180591"),
    "shape empty": ((X, ()), r"'normalized_shape' takes at least one size, got \(\)"),
    "shape negative": ((X, (-1,)), r"'input' takes .* \[-1\], got \[3, 8\]"),
    "weight a list": ((X, (8,), [1.0] * 8), r"'weight' takes a Tensor or None, got list"),
    "weight a number": ((X, (8,), 1.0), r"'weight' takes a Tensor or None, got float"),
    "weight an array": ((X, (8,), W.numpy()), r"'weight' takes a Tensor or None, got ndarray"),
    "weight of another size": ((X, (8,), W[:7]), r"'weight' takes .* \[8\].*, got \[7\]"),
    "weight of another rank": ((X, (8,), W[None]), r"'weight' takes .* \[8\].*, got \[1, 8\]"),
    "weight sparse": ((X, (8,), W.to_sparse()), r"'weight' takes the layout .*sparse_coo"),
    "weight in float8": ((X, (8,), FLOAT8[0]), r"'weight' takes .*, got torch.float8_e4m3fn"),
    "weight elsewhere": ((X, (8,), W.to("meta")), r"'weight' takes .* device cpu, got meta"),
    "eps a string": ((X, (8,), W, "1"), r"'(eps|bias)' takes .*, got str"),
    "eps a list": ((X, (8,), W, [1.0]), r"'(eps|bias)' takes .*, got list"),
    "eps complex": ((X, (8,), W, 1j), r"'(eps|bias)' takes .*, got complex"),
    "eps beyond floats": ((X, (8,), {"eps": HUGE}), r"'eps' takes .* no float holds"),
    "no arguments": ((), "missing .*'input' and 'normalized_shape'"),
    "no shape": ((X,), "missing .*'normalized_shape'"),
    "unknown keyword": ((X, (8,), {"epsilon": 1.0}), "unexpected keyword argument 'epsilon'"),
    "input twice": ((X, (8,), {"input": X}), "multiple values for argument 'input'"),
    "too many arguments": ((X, (8,), W, None, 1.0, 2, 3), "takes .* positional"),
}

# Of F.layer_norm alone.
LAYER_NORM = {
    "bias a list": ((X, (8,), W, [1.0]), r"'bias' takes a Tensor or None, got list"),
    "bias of another size": ((X, (8,), W, W[:7]), r"'bias' takes .* \[8\].*, got \[7\]"),
    "bias of ints": ((X, (8,), W, W.int()), r"'bias' takes float16, .*, got torch.int32"),
    "bias complex": ((X, (8,), W, W + 0j), r"'bias' takes float16, .*, got torch.complex64"),
    "bias sparse": ((X, (8,), W, W.to_sparse()), r"'bias' takes the layout .*sparse_coo"),
    "weight of ints": ((X, (8,), W.int()), r"'weight' takes float16, .*, got torch.int32"),
    "weight of bools": ((X, (8,), W.bool()), r"'weight' takes float16, .*, got torch.bool"),
    "eps None": ((X, (8,), {"eps": None}), r"'eps' takes a float, got NoneType"),
    "eps a string": ((X, (8,), {"eps": "1"}), r"'eps' takes a float, got str"),
}

# Of every function: what PyTorch's does not take, or casts, or, with a residual or a gate, lacks.
EVERY = {
    "input None": ({"input": None}, TypeError, "'input' takes a Tensor, got NoneType"),
    "shape an int": ({"normalized_shape": 8}, TypeError, "'normalized_shape' takes .* got int"),
    "eps a string": ({"eps": "1"}, TypeError, "'eps' takes a float.*, got str"),
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


def right_call(form: Form) -> Callable[[], object]:
    return lambda: getattr(tilenorm, form.op)(**given(form))


def of_functions() -> Iterator[tuple[str, Wrong]]:
    """Every wrong call of a function, with its name."""
    for op in ("rms_norm", "layer_norm"):
        rows = BY_PYTORCH | (LAYER_NORM if op == "layer_norm" else {})
        for name, (arguments, message) in rows.items():
            calls = [with_keywords(getattr(f, op), arguments) for f in (tilenorm, F)]
            yield f"{op}, {name}", Wrong(calls[0], message, calls[1], right_call(FAMILY[op]))
    for name, form in FAMILY.items():
        rows = EVERY | (GATED if form.other == "gate" else {})
        if form.other:
            rows |= {
                f"{form.argument} {what}": (
                    {form.argument: value},
                    kind,
                    f"'{form.argument}' {message}",
                )
                for what, (value, kind, message) in OF_THE_OTHER.items()
            }
        for what, (wrong, kind, message) in rows.items():
            call = with_keywords(getattr(tilenorm, form.op), (given(form) | wrong,))
            yield f"{name}: {what}", Wrong(call, message, kind, right_call(form))
