"""DTensors whose rows are sharded: the processes together give the norm of the whole row."""

from dataclasses import replace
from itertools import product
from random import Random
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import tilenorm
from tests.support import cases, drawing
from tests.support.calls import (
    ADD,
    FAMILY,
    call,
    incoming_of,
    random,
    step,
)
from tests.support.executors import Inputs
from tests.support.pretended import GPU, forgotten
from tests.support.results import check
from tilenorm.ops.torch_ops import sharded_rows
from tilenorm.spec import NormSpec
from tilenorm.table import BRANCH_PORTS, NORMS, OPS

from .placing import alike, case, counted, placed, profiled
from .world import INDUCTOR, NAMES, device, mesh, on_every_rank

ONE = NAMES[0]
FLAT = [name for name in NAMES if "x" not in name]
GATED_LAYER = FAMILY["gated_layer_norm, gate first"]
NAME_OF = {"x": "input", "dx": "input", "dw": "weight", "db": "bias"}
NAME_OF |= {"dresidual": "residual", "dgate": "gate"}
TENSORS = ("x", "residual", "gate", "weight", "bias")


def columns(tensor, name: str, strided: bool = False) -> DTensor:
    """A tensor that each mesh dimension shards in its last dimension."""
    sharded = placed(tensor, name, [Shard(tensor.dim() - 1)] * mesh(name).ndim)
    if not strided or tensor.dim() < 2:
        return sharded
    local, how = sharded.to_local(), {"shape": tensor.shape, "stride": sharded.stride()}
    apart = torch.stack((local, local), -2)[..., 0, :]
    return DTensor.from_local(apart, sharded.device_mesh, sharded.placements, **how)


def results(spec: NormSpec, inputs: Inputs, name: str, needs=None, strided: bool = False) -> dict:
    """The results and the gradients that are needed, by the oracle's names, of sharded rows."""
    tensors = {r: t for r in TENSORS if (t := getattr(inputs, r)) is not None}
    leaves = {NAME_OF.get(r, r): columns(t, name, strided) for r, t in tensors.items()}
    asked = {n: NAME_OF[n] for n in cases.GRADIENTS if needs is None or getattr(needs, n)}
    asked = {n: leaf for n, leaf in asked.items() if leaf in leaves}
    for leaf in asked.values():
        leaves[leaf].requires_grad_()
    options = {n: getattr(spec, n, None) for n in OPS[spec.op].options}
    if "norm_before_gate" in options:
        options["norm_before_gate"] = not spec.gate_first
    if spec.out_dtype:
        options["out_dtype"] = getattr(torch, spec.out_dtype)
    made = getattr(tilenorm, spec.op)(
        **leaves, normalized_shape=(spec.hidden,), eps=inputs.eps, **options
    )
    made = made if isinstance(made, tuple) else (made,)
    dys = [columns(t, name) for t in (inputs.dy, inputs.dsum) if t is not None]
    grads = torch.autograd.grad(made[: len(dys)], [leaves[n] for n in asked.values()], dys)
    found = dict(zip(("y", "sum"), made, strict=False)) | dict(zip(asked, grads, strict=True))
    found = {n: t.detach().full_tensor() for n, t in found.items()}
    return {n: t.reshape(-1) if n in ("dw", "db") else t for n, t in found.items()}


@pytest.mark.any_torch
@pytest.mark.parametrize("op", [op for op in NORMS if not op.endswith("_add")])
@on_every_rank
def test_drawn_rows(op):
    """Within the budget, of any width: a rank may have no columns."""
    rng = Random(op)
    for seed, dtype in product(range(2), cases.DTYPES):
        # Operations of their own join, mask and scale: test_calls.py has these.
        spec = drawing.spec(rng, op, dtype, drawing.hidden(rng, 1500))
        apart = ("addend", "skip", *(port.role for port in BRANCH_PORTS))
        spec = replace(spec, **dict.fromkeys(apart), dropout_scale=1.0)
        inputs = Inputs.random(spec, rng.randint(0, 9), device(), seed)
        needs, name = rng.choice(cases.some_needs(spec)), rng.choice(NAMES)
        if not needs.dsum:
            inputs = replace(inputs, dsum=None)
        check(spec, inputs, results(spec, inputs, name, needs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_every_rank
def test_means_that_are_far_apart(dtype):
    """A mean a thousand times the standard deviation, and one rank's far from the others'."""
    spec = NormSpec("layer", 60, dtype, dtype)
    for apart in ((1000, 1000, 1000), (0, 100, -1000), (1e6, -1e6, 0)):
        inputs = Inputs.random(spec, 7, device())
        x = inputs.x.float()
        for column, shift in zip((0, 15, 30), apart, strict=True):
            x[:, column:] += shift
        inputs = replace(inputs, x=x.to(inputs.x.dtype))
        for name in FLAT:
            check(spec, inputs, results(spec, inputs, name))


SAME = NormSpec("layer", 96, "bfloat16", "bfloat16", "float32", residual="float32")
SAME = SAME, NormSpec("rms", 96, "float32", "float32", gate="bfloat16", gate_first=True)


@pytest.mark.parametrize("spec", SAME, ids=cases.label)
@on_every_rank
def test_a_row_has_the_same_bits_anywhere(spec):
    """In another place, among other rows, of contiguous shards and of strided ones."""
    # Whole vectors: the CPU computes the silu of what fills none by other code, to other bits.
    inputs, order = Inputs.random(spec, 64, device()), torch.arange(64).flip(0)[3:35]
    whole = results(spec, inputs, ONE)
    moved = inputs.with_rows(lambda _, t: t[order])
    some = results(spec, moved, ONE, strided=True)
    for name in whole.keys() - {"dw", "db"}:
        assert torch.equal(whole[name][order], some[name]), name


@pytest.mark.parametrize(
    "form, backend",
    [
        pytest.param(GATED_LAYER, "aot_eager", marks=pytest.mark.slow),
        pytest.param(ADD, "inductor", marks=INDUCTOR),
    ],
)
@on_every_rank
def test_compiled_functions(form, backend):
    """The collectives and the placements of eager calls, and without Inductor their bits. Inductor
    does not round what it keeps in registers.
    """
    torch._dynamo.reset()
    run, rows = torch.compile(call, backend=backend, fullgraph=True), [Shard(2)]
    # Sizes that change become symbols. Inductor compiles them long.
    for count in (4,) if backend == "inductor" else (4, 7):
        given = case(form, count, 6, 32)
        tensors = given.placed(ONE, alike(given, rows, [Shard(0)]))
        incoming = [placed(dy, ONE, rows) for dy in incoming_of(given.tensors)]
        expected, _ = counted(step, form, tensors, incoming)
        step(form, tensors, incoming, function=run)  # compiles
        found, collectives = profiled(step, form, tensors, incoming, function=run)
        number = 3 if "layer" in form.op else 2
        assert sum(collectives.values()) == (number if mesh(ONE).size() > 1 else 0), collectives
        for n, result in found.items():
            assert result.placements == expected[n].placements
            tolerance = {} if backend == "inductor" else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(result.to_local(), expected[n].to_local(), **tolerance)


@on_every_rank
def test_checkpointed():
    form, rows = GATED_LAYER, [Shard(2)]
    given = case(form, 4, 3, 32, dtype=torch.bfloat16)
    tensors = given.placed(ONE, alike(given, rows, [Shard(0)]))
    incoming = [placed(dy, ONE, rows) for dy in incoming_of(given.tensors)]

    def recomputed(form, leaves):
        def run(*values):
            return call(form, dict(zip(leaves, values, strict=True)))

        return checkpoint(run, *leaves.values(), use_reentrant=False)

    expected = step(form, tensors, incoming)
    for n, result in step(form, tensors, incoming, function=recomputed).items():
        assert torch.equal(result.to_local(), expected[n].to_local()), n


@on_every_rank
def test_there_are_no_kernels():
    """Where the kernels would serve whole rows, a warning says what serves, and once."""
    x = placed(random(4, 32, device=device()), ONE, [Shard(1)])
    with pytest.raises(ValueError, match=r"argument 'backend' takes .*, got 'unknown'"):
        tilenorm.rms_norm(x, (32,), backend="unknown")
    with forgotten(sharded_rows._selected), patch.object(sharded_rows, "device_of", lambda *_: GPU):
        with pytest.warns(tilenorm.ReferenceWarning, match="instead of cutile: rows are sharded"):
            found = tilenorm.rms_norm(x, (32,))
        with pytest.raises(RuntimeError, match="'cutile' was asked for, but rows are sharded"):
            tilenorm.rms_norm(x, (32,), backend="cutile")
    assert torch.equal(
        tilenorm.rms_norm(x, (32,), backend="reference").to_local(), found.to_local()
    )
