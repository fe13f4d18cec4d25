"""Jagged nested tensors: the rows of ragged sequences are rows like any others."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilenorm
from tests.support.calls import CALLS, call, random, rows_of, same, slow, step, tensors_of

LENGTHS = (2, 0, 1)


def jagged(values: Tensor, like: Tensor | None = None, ragged: int = 1) -> Tensor:
    """A nested tensor of sequences of LENGTHS, or with the structure of another."""
    if like is None:
        offsets = torch.tensor([0, *LENGTHS], device=values.device).cumsum(0)
    else:
        offsets = like.offsets()
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged)


def call_nested(form, tensors: dict[str, Tensor], **options) -> tuple[Tensor, ...]:
    """The values of what the function gives for nested tensors of these values."""
    x = jagged(tensors["input"])
    nested = tensors | {n: jagged(t, x) for n, t in rows_of(tensors).items()}
    outputs = call(form, nested | {"input": x}, **options)
    for y in outputs:
        assert y.is_nested and y.shape == x.shape  # the same ragged sizes
        assert y.offsets() is x.offsets()
    return tuple(y.values() for y in outputs)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("heads", [None, 2], ids=["one weight", "heads"])
def test_outputs_and_gradients_are_those_of_the_values(device, form, heads):
    lead = (sum(LENGTHS),) if heads is None else (sum(LENGTHS), heads)
    shape = (16,) if heads is None else (heads, 16)
    tensors = tensors_of(form, *lead, 16, parameter_shape=shape, device=device)
    for _ in range(2):
        assert same(step(form, tensors, function=call_nested), step(form, tensors))


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_as_pytorchs_function(device, op):
    x, w = jagged(random(sum(LENGTHS), 2, 16, device=device)), random(16, device=device, seed=1)
    for given in (x, x.transpose(1, 2)):
        ours, theirs = (getattr(library, op)(given, (16,), w) for library in (tilenorm, F))
        assert ours.shape == theirs.shape
        for a, b in zip(ours.unbind(), theirs.unbind(), strict=True):
            torch.testing.assert_close(a, b)


# A form, whether sizes are dynamic, and the backend. Inductor takes seconds for each.
COMPILED = [("rms_norm", None, "aot_eager"), ("add_rms_norm, two residuals", True, "aot_eager")]
COMPILED += slow(
    ("gated_rms_norm, gate first", True, "aot_eager"),
    ("add_layer_norm, masked and scaled", True, "inductor"),
    ("rms_norm", None, "inductor"),
)


def call_nested_inside(form, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """As call_nested; each nested tensor has a ragged size that is no argument of the graph."""
    x = jagged(tensors["input"])
    nested = tensors | {n: jagged(t, x) for n, t in rows_of(tensors).items()}
    return tuple(y.values() for y in call(form, nested | {"input": x}))


@pytest.mark.parametrize("name, dynamic, backend", COMPILED)
def test_tensors_made_inside_a_compiled_function(dynamo, name, dynamic, backend):
    form = CALLS[name]
    tensors = tensors_of(form, sum(LENGTHS), 16)
    run = torch.compile(call_nested_inside, backend=backend, fullgraph=True, dynamic=dynamic)
    assert same(step(form, tensors, function=run), step(form, tensors))


def chain_inside(values, weight):
    x = jagged(values)
    y, total = tilenorm.rms_norm_add_rms_norm(x, x.sin(), (16,), weight, weight)
    return y.values(), total.values()


def transposed_inside(values, weight):
    x = jagged(values.view(-1, 2, 16)).transpose(1, 2)
    return tuple(t.values() for t in tilenorm.add_layer_norm(x, x.sin(), (16,), weight))


def other_lengths_inside(values, weight):
    x, other = jagged(values), jagged(values)
    return tilenorm.gated_rms_norm(x, other, (16,), weight).values()


@pytest.mark.parametrize("function", [chain_inside, transposed_inside])
def test_more_that_is_made_inside_a_compiled_function(dynamo, function):
    run = torch.compile(function, backend="aot_eager", fullgraph=True)
    found = []
    for called in (run, function):
        width = 32 if function is transposed_inside else 16
        values, weight = random(sum(LENGTHS), width), random(16, seed=1)
        outputs = called(values.requires_grad_(), weight.requires_grad_())
        sum(y.float().square().sum() for y in outputs).backward()
        found.append([*outputs, values.grad, weight.grad])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def test_other_lengths_made_inside_a_compiled_function_are_refused(dynamo):
    run = torch.compile(other_lengths_inside, backend="aot_eager")
    with pytest.raises(RuntimeError, match="'gate' takes the input's shape"):
        run(random(sum(LENGTHS), 16), random(16, seed=1))


X = jagged(random(sum(LENGTHS), 16))
DENSE = random(3, 3, 16)
HOLES = torch.nested.narrow(
    DENSE, 1, torch.zeros(3).long(), torch.tensor([3, 1, 2]), layout=torch.jagged
)
OTHER_LENGTHS, BY_DIMENSION = jagged(random(sum(LENGTHS), 16)), jagged(random(2, 3, 16), ragged=2)
# The function, the shape, the tensors, the exception and the message.
REFUSED = (
    ("rms_norm", X.shape[1:], {"input": X}, ValueError, "after the ragged one"),
    ("rms_norm", (16,), {"input": BY_DIMENSION, "weight": random(3, 16)}, ValueError, "ragged one"),
    ("rms_norm", (16,), {"input": X, "weight": X}, RuntimeError, "'weight' takes no nested"),
    ("rms_norm", (16,), {"input": HOLES}, RuntimeError, "holes"),
    ("add_rms_norm", (16,), {"input": X, "residual": DENSE}, RuntimeError, "'residual'"),
    ("add_rms_norm", (16,), {"input": X, "residual": (DENSE, X)}, RuntimeError,
     r"'residual\[0\]' takes a nested tensor"),
    ("add_rms_norm", (16,), {"input": DENSE, "residual": X}, RuntimeError, "'input'"),
    ("gated_rms_norm", (16,), {"input": X, "gate": OTHER_LENGTHS}, RuntimeError,
     "'gate' takes the input's shape"),
)  # fmt: skip


@pytest.mark.parametrize("op, shape, tensors, error, message", REFUSED)
def test_refused(op, shape, tensors, error, message):
    for _ in range(2):
        with pytest.raises(error, match=message):
            getattr(tilenorm, op)(**tensors, normalized_shape=shape)
