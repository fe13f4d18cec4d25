"""Bad input raises at once, as F.rms_norm does, and by name; nothing runs."""

import pytest
import torch
import torch.nn.functional as F

import tilenorm
from tilenorm.ops import cutile, reference

from .helpers import NEEDS_GPU

X, W = torch.ones(3, 8), torch.ones(8)


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
    "weight of another size": ((X, (8,), W[:7]), r"'weight' takes .* \[8\], got \[7\]"),
    "weight of another rank": ((X, (8,), W[None]), r"'weight' takes .* \[8\], got \[1, 8\]"),
    "weight elsewhere": ((X, (8,), W.to("meta")), r"'weight' takes .* device cpu, got meta"),
    "input elsewhere": ((X.to("meta"), (8,), W), r"'weight' takes .* device meta, got cpu"),
    "eps a string": ((X, (8,), W, "1e-5"), r"'eps' takes a float or None, got str"),
    "eps a list": ((X, (8,), W, [1e-5]), r"'eps' takes a float or None, got list"),
    "eps complex": ((X, (8,), W, 1j), r"'eps' takes a float or None, got complex"),
}

# PyTorch 2.13 raises ValueError for these; some versions before it raise RuntimeError.
TOO_FEW_DIMENSIONS = {
    "a scalar": ((torch.tensor(1.0), (1,)), r"'input' takes at least the 1 dimensions .*, got 0"),
    "a matrix": ((X, (2, 3, 8)), r"'input' takes at least the 3 dimensions .*, got 2"),
}

BEYOND_PYTORCH = {
    "bias a list": ({"bias": [1.0] * 8}, TypeError, r"'bias' takes a Tensor or None, got list"),
    "bias of another size": ({"bias": W[:7]}, RuntimeError, r"'bias' takes .* \[8\], got \[7\]"),
    "bias elsewhere": ({"bias": W.to("meta")}, RuntimeError, r"'bias' takes .* cpu, got meta"),
    "bias of ints": ({"bias": W.int()}, NotImplementedError, r"'bias' takes .* got torch.int32"),
    # PyTorch casts these two, and warns.
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
    "offset a string": ({"offset": "1"}, TypeError, r"'offset' takes a float, got str"),
    "offset None": ({"offset": None}, TypeError, r"'offset' takes a float, got NoneType"),
    "offset a tensor": ({"offset": W[0]}, TypeError, r"'offset' takes a float, got Tensor"),
    "backend an int": ({"backend": 3}, TypeError, r"'backend' takes a str or None, got int"),
    "backend unknown": (
        {"backend": "triton"},
        ValueError,
        r"backend: got 'triton', takes one of cutile, reference",
    ),
}


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("ran on bad input")

    for module, name in (
        (torch, "empty"),
        (cutile, "forward"),
        (cutile, "launch"),
        (reference, "rms_norm"),
    ):
        monkeypatch.setattr(module, name, fail)


@pytest.mark.parametrize("case", BY_PYTORCH)
def test_the_same_exception_as_pytorch(case):
    arguments, message = BY_PYTORCH[case]
    with pytest.raises(Exception) as theirs:
        F.rms_norm(*arguments)
    with pytest.raises(theirs.type, match=f"^rms_norm: argument {message}") as ours:
        tilenorm.rms_norm(*arguments)
    assert ours.type is theirs.type


@pytest.mark.parametrize("case", TOO_FEW_DIMENSIONS)
def test_too_few_dimensions(case):
    arguments, message = TOO_FEW_DIMENSIONS[case]
    with pytest.raises((ValueError, RuntimeError)):
        F.rms_norm(*arguments)
    with pytest.raises(ValueError, match=f"^rms_norm: argument {message}"):
        tilenorm.rms_norm(*arguments)


@pytest.mark.parametrize("case", BEYOND_PYTORCH)
def test_what_pytorch_does_not_take_or_check(case):
    options, kind, message = BEYOND_PYTORCH[case]
    with pytest.raises(kind, match=message) as raised:
        tilenorm.rms_norm(X, (8,), **options)
    assert raised.type is kind


def test_bias_and_offset_by_keyword_alone():
    with pytest.raises(TypeError, match="positional"):
        tilenorm.rms_norm(X, (8,), W, 1e-5, W)


@pytest.mark.parametrize("case", BY_PYTORCH)
def test_explain_raises_the_same(case):
    arguments, message = BY_PYTORCH[case]
    with pytest.raises(Exception, match=f"^rms_norm: argument {message}"):
        tilenorm.explain("rms_norm", *arguments)


@NEEDS_GPU
def test_parameters_on_another_device():
    x, w = X.cuda(), W.cuda()
    with pytest.raises(RuntimeError, match=r"'weight' takes .* cuda:0, got cpu"):
        tilenorm.rms_norm(x, (8,), W)
    with pytest.raises(RuntimeError, match=r"'bias' takes .* cpu, got cuda:0"):
        tilenorm.rms_norm(X, (8,), bias=w)
