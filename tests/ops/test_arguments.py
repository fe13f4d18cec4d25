"""Bad input raises at once, as PyTorch's functions do, and by name; nothing runs."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import tilenorm
from tilenorm.ops import cutile, reference
from tilenorm.spec import OPS

from .helpers import EACH_FORM, EACH_WITH_OTHER, NEEDS_GPU, call, tensors_of

X, W = torch.ones(3, 8), torch.ones(8)
LIKE_PYTORCH = pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])


# What is passed, and what the message says: the argument, what it takes, what it got.
BY_PYTORCH = {
    "input a list": (([1.0], (8,)), r"'input' takes a Tensor, got list"),
    "input None": ((None, (8,)), r"'input' takes a Tensor, got NoneType"),
    "input of ints": ((X.int(), (8,)), r"'input' takes float16, .*, got torch.int32"),
    "input of bools": ((X.bool(), (8,)), r"'input' takes float16, .*, got torch.bool"),
    "input in float8": (
        (X.to(torch.float8_e4m3fn), (8,)),
        r"'input' takes float16, .*, got torch.float8_e4m3fn",
    ),
    "input of another size": ((X, (7,)), r"'input' takes .* \[7\], got \[3, 8\]"),
    "input of another first size": ((X, (4, 8)), r"'input' takes .* \[4, 8\], got \[3, 8\]"),
    "shape an int": ((X, 8), r"'normalized_shape' takes a tuple of ints, got int"),
    "shape a string": ((X, "8"), r"'normalized_shape' takes a tuple of ints, got str"),
    "shape None": ((X, None), r"'normalized_shape' takes a tuple of ints, got NoneType"),
    "shape a tensor": ((X, W.int()), r"'normalized_shape' takes a tuple of ints, got Tensor"),
    "shape of floats": ((X, (8.0,)), r"'normalized_shape' takes a tuple of ints, got \(8\.0,\)"),
    "shape of bools": ((X[:, :1], (True,)), r"'normalized_shape' takes .*, got \(True,\)"),
    "shape empty": ((X, ()), r"'normalized_shape' takes at least one size, got \(\)"),
    "shape negative": ((X, (-1,)), r"'input' takes .* \[-1\], got \[3, 8\]"),
    "weight a list": ((X, (8,), [1.0] * 8), r"'weight' takes a Tensor or None, got list"),
    "weight of another size": ((X, (8,), W[:7]), r"'weight' takes .* \[8\].*, got \[7\]"),
    "weight of another rank": ((X, (8,), W[None]), r"'weight' takes .* \[8\].*, got \[1, 8\]"),
    "weight elsewhere": ((X, (8,), W.to("meta")), r"'weight' takes .* device cpu, got meta"),
    "input elsewhere": ((X.to("meta"), (8,), W), r"'weight' takes .* device meta, got cpu"),
}
EPS_BY_PYTORCH = {"a string": "1e-5", "a list": [1e-5], "complex": 1j}

TOO_FEW_DIMENSIONS = {
    "a scalar": ((torch.tensor(1.0), (1,)), r"'input' takes at least the 1 dimensions .*, got 0"),
    "a matrix": ((X, (2, 3, 8)), r"'input' takes at least the 3 dimensions .*, got 2"),
}

# Of every function: what PyTorch's does not take, or casts, or, with a residual or a gate, lacks.
BEYOND_PYTORCH = {
    "input None": ({"input": None}, TypeError, r"'input' takes a Tensor, got NoneType"),
    "shape an int": ({"normalized_shape": 8}, TypeError, r"'normalized_shape' takes .* got int"),
    "eps a string": ({"eps": "1"}, TypeError, r"'eps' takes a float.*, got str"),
    "bias a list": ({"bias": [1.0] * 8}, TypeError, r"'bias' takes a Tensor or None, got list"),
    "bias of another size": ({"bias": W[:7]}, RuntimeError, r"'bias' takes .* \[8\].*, got \[7\]"),
    "bias elsewhere": ({"bias": W.to("meta")}, RuntimeError, r"'bias' takes .* cpu, got meta"),
    "bias of ints": ({"bias": W.int()}, NotImplementedError, r"'bias' takes .* got torch.int32"),
    "weight of ints": (
        {"weight": W.int()},
        NotImplementedError,
        r"'weight' takes .* got torch.int32",
    ),
    "weight complex": (
        {"weight": W.to(torch.complex64)},
        NotImplementedError,
        r"'weight' takes .* got torch.complex64",
    ),
    "weight by heads": (
        {"weight": torch.ones(2, 8)},
        RuntimeError,
        r"'weight' takes the shape of normalized_shape \[8\] or, by heads, \[3, 8\], got \[2, 8\]",
    ),
    "weight by heads, bias not": (
        {"weight": torch.ones(3, 8)},
        RuntimeError,
        r"'bias' takes the shape of weight \[3, 8\], got \[8\]",
    ),
    "bias by heads, weight not": (
        {"bias": torch.ones(3, 8)},
        RuntimeError,
        r"'bias' takes the shape of weight \[8\], got \[3, 8\]",
    ),
    "offset a string": ({"offset": "1"}, TypeError, r"'offset' takes a float, got str"),
    "offset None": ({"offset": None}, TypeError, r"'offset' takes a float, got NoneType"),
    "offset a tensor": ({"offset": W[0]}, TypeError, r"'offset' takes a float, got Tensor"),
    "rounding None": (
        {"rounding": None},
        ValueError,
        r"'rounding' takes 'late' or 'early', got None",
    ),
    "rounding unknown": (
        {"rounding": "Early"},
        ValueError,
        r"'rounding' takes 'late' or 'early', got 'Early'",
    ),
    "backend an int": ({"backend": 3}, TypeError, r"'backend' takes a str or None, got int"),
    "backend unknown": (
        {"backend": "triton"},
        ValueError,
        r"backend: got 'triton', takes one of cutile, reference",
    ),
}

OF_THE_OTHER = {
    "None": (None, TypeError, "takes a Tensor, got NoneType"),
    "a list": ([1.0], TypeError, "takes a Tensor, got list"),
    "another size": (X[:2], RuntimeError, r"takes the input's shape \[3, 8\], got \[2, 8\]"),
    "one that would broadcast": (W, RuntimeError, r"takes the input's shape \[3, 8\], got \[8\]"),
    "ints": (X.int(), NotImplementedError, "takes float16, .* got torch.int32"),
    "elsewhere": (X.to("meta"), RuntimeError, "takes the input's device cpu, got meta"),
}


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("ran on bad input")

    for module, name in (
        (torch, "empty"),
        (cutile, "forward"),
        (cutile, "launch"),
        (reference, "forward"),
    ):
        monkeypatch.setattr(module, name, fail)


@LIKE_PYTORCH
@pytest.mark.parametrize("case", BY_PYTORCH)
def test_the_same_exception_as_pytorch(case, op):
    arguments, message = BY_PYTORCH[case]
    with pytest.raises(Exception) as theirs:
        getattr(F, op)(*arguments)
    with pytest.raises(theirs.type, match=f"^{op}: argument {message}") as ours:
        getattr(tilenorm, op)(*arguments)
    assert ours.type is theirs.type


@LIKE_PYTORCH
@pytest.mark.parametrize("case", EPS_BY_PYTORCH)
def test_the_same_exception_for_eps(case, op):
    for function in (getattr(F, op), getattr(tilenorm, op)):
        with pytest.raises(TypeError, match="eps"):
            function(X, (8,), W, eps=EPS_BY_PYTORCH[case])


@pytest.mark.parametrize("function", [F.layer_norm, tilenorm.layer_norm, tilenorm.add_layer_norm])
def test_no_layer_norm_takes_none_for_eps(function):
    others = (X,) if function is tilenorm.add_layer_norm else ()
    with pytest.raises(TypeError, match=r"'eps' .*\bfloat,.* (not|got) NoneType"):
        function(X, *others, (8,), eps=None)


# PyTorch 2.13 raises ValueError in rms_norm; some versions before it raise RuntimeError.
@pytest.mark.parametrize("op, kind", [("rms_norm", ValueError), ("layer_norm", RuntimeError)])
@pytest.mark.parametrize("case", TOO_FEW_DIMENSIONS)
def test_too_few_dimensions(case, op, kind):
    arguments, message = TOO_FEW_DIMENSIONS[case]
    with pytest.raises((kind, RuntimeError)):
        getattr(F, op)(*arguments)
    with pytest.raises(kind, match=f"^{op}: argument {message}"):
        getattr(tilenorm, op)(*arguments)


@EACH_FORM
@pytest.mark.parametrize("case", BEYOND_PYTORCH)
def test_every_function_names_what_is_wrong(case, form):
    wrong, kind, message = BEYOND_PYTORCH[case]
    tensors = {name: X if name in ("input", form.other) else W for name in form.names}
    arguments = {**tensors, "normalized_shape": (8,), **form.options, **wrong}
    with pytest.raises(kind, match=message) as raised:
        getattr(tilenorm, form.op)(**arguments)
    assert raised.type is kind


@EACH_WITH_OTHER
@pytest.mark.parametrize("case", OF_THE_OTHER)
def test_the_other_input(case, form):
    other, kind, message = OF_THE_OTHER[case]
    with pytest.raises(kind, match=f"^{form.op}: argument '{form.other}' {message}") as raised:
        getattr(tilenorm, form.op)(X, other, (8,), **form.options)
    assert raised.type is kind


@pytest.mark.parametrize("op", OPS)
def test_by_keyword_alone_beyond_pytorch(op):
    parameters = inspect.signature(getattr(tilenorm, op)).parameters
    inputs = ["input", *(n for n in ("residual", "gate") if n in parameters)]
    pytorch = ["normalized_shape", "weight", *(["bias"] if "layer" in op else []), "eps"]
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == inputs + pytorch
    assert all(p.kind is p.KEYWORD_ONLY for n, p in parameters.items() if n not in positional)


@LIKE_PYTORCH
@pytest.mark.parametrize("case", BY_PYTORCH)
def test_explain_raises_the_same(case, op):
    arguments, message = BY_PYTORCH[case]
    with pytest.raises(Exception, match=f"^{op}: argument {message}"):
        tilenorm.explain(op, *arguments)


@NEEDS_GPU
@EACH_FORM
def test_what_is_on_another_device(form):
    tensors = tensors_of(form, 3, 8)
    for name in form.names[1:]:
        with pytest.raises(RuntimeError, match=rf"'{name}' takes .* cpu, got cuda:0"):
            call(form, tensors | {name: tensors[name].cuda()})
        elsewhere = {n: t if n == name else t.cuda() for n, t in tensors.items()}
        with pytest.raises(RuntimeError, match=rf"'{name}' takes .* cuda:0, got cpu"):
            call(form, elsewhere)
