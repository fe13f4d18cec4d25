"""Calls with a dropout mask and a layer scale: graphs, the op, wrong arguments."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import tilenorm
from tilenorm.ops import dispatch
from tilenorm.spec import PLAIN, Options

from .helpers import EACH_DEVICE, EPS, random
from .test_branch import (
    BF16,
    DTYPES,
    EACH_KIND,
    EACH_OP,
    KINDS,
    SCALE,
    N,
    call,
    compare,
    made,
    step,
)

pytestmark = EACH_DEVICE


@pytest.mark.parametrize(
    "op, names", [("add_rms_norm", "mask"), ("add_layer_norm", "scale"), ("add_rms_norm", "both")]
)
def test_compiled_the_same_bits_without_recompiling(device, op, names, dynamo):
    backend = "inductor" if device == "cuda" else "aot_eager"
    run = torch.compile(lambda t: call(op, t), fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 16, 17):
        tensors = made(KINDS[names], rows, N, dtypes=(BF16, BF16, BF16), device=device)
        with dynamo.config.patch(error_on_recompile=rows != 3):
            got = step(op, tensors, lambda _, t: run(t))
        compare(got, step(op, tensors))


@EACH_OP
@EACH_KIND
def test_a_graph_has_one_op_each_way(device, op, kind):
    tensors = made(kind, 3, N, device=device)
    names = [n for n in tensors if n != "dropout_mask"]

    def run(*given):
        outputs = call(op, tensors | dict(zip(names, given, strict=True)))
        return torch.autograd.grad(sum(y.square().sum() for y in outputs), given)

    given = [tensors[n].requires_grad_() for n in names]
    graph = make_fx(run)(*given)
    ops, targets = torch.ops.tilenorm, [node.target for node in graph.graph.nodes]
    assert targets.count(ops.norm.default) == targets.count(ops.norm_backward.default) == 1
    assert all(map(torch.equal, graph(*given), run(*given)))


def op_arguments(tensors, op, save=True):
    order = ("input", "residual", None, "weight", "bias", None, None, *KINDS["both"])
    given = [tensors.get(name) for name in order]
    norm = "layer" if "layer" in op else "rms"
    options = Options(tensors["input"].shape[-1], norm, dropout_scale=SCALE)
    return *given[:PLAIN], *options, EPS, save, None, *given[PLAIN:]


@EACH_OP
@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2]], ids=str)
def test_opcheck(device, op, dtypes):
    tensors = made(KINDS["both"], 3, N, dtypes=dtypes, device=device)
    for tensor in tensors.values():
        tensor.requires_grad_(tensor.is_floating_point())
    opcheck(torch.ops.tilenorm.norm.default, op_arguments(tensors, op))


@EACH_OP
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_call_is_remembered(device, op, monkeypatch):
    seen, original = [], dispatch._checked
    monkeypatch.setattr(dispatch, "_checked", lambda op, *a: seen.append(op) or original(op, *a))
    tensors = made(KINDS["both"], 5, N, device=device)
    expected = call(op, tensors)
    for rows in (5, 7, 1):
        call(op, made(KINDS["both"], rows, N, device=device))
    assert len(seen) == 1 and all(map(torch.equal, call(op, tensors), expected))
    other = call(op, tensors, dropout_scale=2.0)
    assert len(seen) == 2 and not torch.equal(other[1], expected[1])
    with pytest.raises(RuntimeError, match="'dropout_mask' takes the input's shape"):
        call(op, tensors | {"dropout_mask": tensors["dropout_mask"][:3]})
    with pytest.raises(RuntimeError, match="'layer_scale' takes the shape of normalized_shape"):
        call(op, tensors | {"layer_scale": tensors["layer_scale"][:3]})


MASK = torch.ones(5, N, dtype=torch.bool)
WRONG = {
    "a scale alone": ({"dropout_scale": 2.0}, ValueError, "'dropout_scale' takes 1.0 without"),
    "no float": ({"dropout_mask": MASK, "dropout_scale": "2"}, TypeError, "'dropout_scale' takes"),
    "no tensor": ({"dropout_mask": [True]}, TypeError, "'dropout_mask' takes a Tensor or None"),
    "a float mask": ({"dropout_mask": MASK.float()}, NotImplementedError, "takes torch.bool, got"),
    "a short mask": (
        {"dropout_mask": MASK[:3]},
        RuntimeError,
        r"takes the input's shape \[5, 40\]",
    ),
    "elsewhere": ({"dropout_mask": MASK.to("meta")}, RuntimeError, "takes the input's device"),
    "a long scale": ({"layer_scale": torch.ones(N + 1)}, RuntimeError, r"takes the shape .*\[41\]"),
    "scales of rows": ({"layer_scale": torch.ones(5, N)}, RuntimeError, "takes the shape of"),
    "an int scale": ({"layer_scale": torch.ones(N).int()}, NotImplementedError, "takes float16"),
    "fewer digits": (
        {"residual": torch.ones(5, N).half(), "layer_scale": torch.ones(N)},
        RuntimeError,
        "'residual' takes at least the digits",
    ),
    "two residuals": (
        {"residual": (torch.ones(5, N), torch.ones(5, N)), "layer_scale": torch.ones(N)},
        RuntimeError,
        "'layer_scale' takes None with two residuals",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@EACH_OP
def test_wrong_calls(device, op, what):
    wrong, kind, message = WRONG[what]
    x = random(5, N, device="cpu")
    given = {"residual": x} | wrong
    for function in (getattr(tilenorm, op), lambda *a, **b: tilenorm.explain(op, *a, **b)):
        with pytest.raises(kind, match=f"{op}: argument .*{message}"):
            function(x, normalized_shape=(N,), **given)


def test_what_the_op_refuses(device):
    x, mask = random(5, N, device=device), MASK.to(device)
    how = (*Options(N, "rms"), EPS, False, None, None, None)
    for given in ((x, None), (x, x)):
        with pytest.raises(NotImplementedError, match="take one residual"):
            residual = given[1]
            addend = None if residual is None else x
            torch.ops.tilenorm.norm(x, residual, None, None, None, *how[:-2], addend, None, mask)


@EACH_OP
def test_nested(device, op):
    tensors = made(KINDS["both"], 3, N, device=device)
    offsets = torch.tensor([0, 2, 2, 3], device=device)

    def nested(_, given):
        rows = {
            n: torch.nested.nested_tensor_from_jagged(t, offsets)
            for n, t in given.items()
            if n in ("input", "residual", "dropout_mask")
        }
        return tuple(y.values() for y in call(op, given | rows))

    compare(step(op, tensors, nested), step(op, tensors))


@EACH_OP
@EACH_KIND
def test_a_mode_sees_the_public_function_with_its_arguments(device, op, kind):
    seen, tensors = [], made(kind, 3, N, device=device)

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is getattr(tilenorm, op):
                seen.append(kwargs)
            return function(*args, **(kwargs or {}))

    expected = call(op, tensors)
    with Seen():
        found = call(op, tensors)
    assert all(map(torch.equal, found, expected))
    ((given),) = seen
    assert all(given[n] is tensors[n] for n in kind)
    assert given["dropout_scale"] == (SCALE if "dropout_mask" in kind else 1.0)


@EACH_OP
def test_a_traced_graph_calls_the_public_function(device, op):
    x, r, mask = random(3, N, device=device), random(3, N, device=device, seed=1), MASK[:3]

    def run(x, r, mask):
        how = {"dropout_mask": mask, "dropout_scale": 2.0, "eps": EPS}
        return getattr(tilenorm, op)(x, r, (N,), **how)

    traced = torch.fx.symbolic_trace(run)
    assert getattr(tilenorm, op) in [node.target for node in traced.graph.nodes]
    assert all(map(torch.equal, traced(x, r, mask.to(device)), run(x, r, mask.to(device))))


def test_what_is_explained(device):
    x = random(5, N, device=device)
    how = {"dropout_mask": MASK.to(device), "dropout_scale": 2.0, "layer_scale": x[0]}
    told = str(tilenorm.explain("add_rms_norm", x, x, (N,), eps=EPS, **how))
    assert "input masked, times 2" in told and "layer scale float32" in told
