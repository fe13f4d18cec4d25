"""When the rules are registered, and what they say: in this process and in new ones."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _op_schema

from tilenorm.ops.sharding import backward_strategies, norm_strategies
from tilenorm.ops.torch_private import keep_every_argument
from tilenorm.spec import Options

from .world import slow_but_first

ROOT = Path(__file__).parents[2]
R, P = Replicate(), Partial()

# A process with one rank, which first meets a DTensor in a use.
ONE_RANK = """
import sys, tempfile
import torch
import torch.distributed as dist

torch.set_num_threads(1)


def first(use):
    import tilenorm
    from tilenorm.spec import Options

    assert "torch.distributed.tensor" not in sys.modules, "importing tilenorm loads it"
    how = (*Options(8, "rms"), 1e-6)
    op, op_backward = torch.ops.tilenorm.norm, torch.ops.tilenorm.norm_backward
    tilenorm.rms_norm(torch.ones(4, 6, 8), (8,))
    op(torch.ones(4, 6, 8, device="meta"), *[None] * 4, *how, True)
    assert "torch.distributed.tensor" not in sys.modules, "a call of plain tensors loads it"

    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    store = "file://" + tempfile.mkdtemp() + "/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.randn(4, 6, 8), mesh, [Shard(1)])
    w = distribute_tensor(torch.randn(8), mesh, [Replicate()])
    used = {**globals(), **locals()}
    exec(use, used)
    assert used["y"].placements == (Shard(1),), used["y"].placements
    for _ in range(2):  # the first call's key of DTensor's cache is older than the registration
        for parameters in ((w, None), (None, w), (None, None)):
            for added in ((x, None), (None, x), (None, None)):
                found = op(x, *added, *parameters, *how, True)
                rows = [Shard(1), Shard(1) if added[0] is not None else Replicate()]
                rows += [Replicate(), Shard(1)]
                assert [t.placements[0] for t in found] == rows
    dist.destroy_process_group()


first(sys.argv[1])
"""
USES = {
    "the op of an inference tensor": """
with torch.inference_mode():
    y = op(x * 2, None, None, w, None, *how, False)[0]
""",
    "a function": "y = tilenorm.rms_norm(x, (8,), w)",
    "a function with gradients": "y = tilenorm.rms_norm(x.requires_grad_(), (8,), w).detach()",
    "a function in inference mode": """
with torch.inference_mode():
    y = tilenorm.rms_norm(x, (8,), w)
""",
    "the op": "y = op(x, None, None, w, None, *how, True)[0]",
    "the backward op": """
rstd = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
y = op_backward(x, None, x, None, w, None, None, rstd, *how, False, [True] * 5)[0]
""",
    "a compiled function": """
run = torch.compile(lambda x: tilenorm.rms_norm(x, (8,)), backend="aot_eager", fullgraph=True)
y = run(x)
""",
}


@pytest.mark.parametrize("use", slow_but_first(USES))
def test_the_first_use_registers_the_rules(use):
    command = [sys.executable, "-W", "ignore", "-c", ONE_RANK, USES[use]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Meta(NamedTuple):
    dtype: torch.dtype


class Spec(NamedTuple):
    """What a rule may know of a tensor. DTensor's own has a plain tuple for a shape at times."""

    shape: tuple[int, ...]
    tensor_meta: Meta = Meta(torch.float32)


X, W, HEADS = Spec((4, 6, 8)), Spec((8,)), Spec((6, 8))


def test_the_rules_of_a_norm():
    given = (X, X, None, W, None, *Options(8, "rms"), 1e-6, True)
    expected = [([p, p, R, p], [p, p, None, R, None]) for p in (R, Shard(0), Shard(1))]
    for last in ((), (None,)):  # a default at the end is missing
        found = norm_strategies((*given, *last))
        rest = [None] * (len(given) + len(last) - 5)
        assert found == [(results, [*arguments, *rest]) for results, arguments in expected]


def test_the_rules_without_statistics_of_rows_of_two_dimensions():
    given = (X, None, X, None, None, *Options(48, "layer"), 1e-6, False, None)
    found = norm_strategies(given)
    assert [results for results, _ in found] == [[p, R, R, R] for p in (R, Shard(0))]


@pytest.mark.parametrize("parameters", [(HEADS, HEADS), (None, HEADS), (HEADS, None)])
def test_the_rules_of_weights_by_head(parameters):
    given = (X, None, None, *parameters, *Options(8, "layer"), 1e-6, True)
    found = norm_strategies(given)
    by_head = [None if p is None else Shard(0) for p in parameters]
    assert [r for r, _ in found] == [[p, R, p, p] for p in (R, Shard(0), Shard(1))]
    assert found[-1][1][3:5] == by_head


@pytest.mark.parametrize("weight, of_sums", [(W, (R, P, P)), (HEADS, (R, P, Shard(0)))])
def test_the_rules_of_the_gradients(weight, of_sums):
    rstd, last = Spec((4, 6)), (*Options(8, "rms"), 1e-6, False)
    given = (X, None, X, None, weight, None, None, rstd, *last, [True] * 5)
    found = backward_strategies(given)
    for (results, arguments), p, sums in zip(found, (R, Shard(0), Shard(1)), of_sums, strict=True):
        weights = Shard(0) if sums == Shard(0) else R
        assert results == [p, R, R, sums, R, R]
        assert arguments == [p, None, p, None, weights, None, None, p, *[None] * 10]
    # What is not asked for is empty.
    given = (*given[:-1], [True, False, False, False, False])
    assert [r[3] for r, _ in backward_strategies(given)] == [R, R, R]


def test_the_rules_of_several_terms_and_of_the_output():
    given = (X, X, X, None, W, None, None, Spec((4, 6)), *Options(8, "rms"), 1e-6, False)
    for last, terms in (((X,), [0]), ((X, X, None, True), [0, 0, None, None])):
        arguments = (*given, [True] * 5, None, *last)
        found = backward_strategies(arguments)
        for (results, placed), p in zip(found, (R, Shard(0), Shard(1)), strict=True):
            assert results[5] == (p if True in last else R)
            assert placed[-len(last) :] == [p if t == 0 else None for t in terms]


def test_rows_without_elements_are_replicated():
    given = (Spec((4, 0)), None, None, None, None, *Options(0, "rms"), 1e-6, True)
    assert len(norm_strategies(given)) == 1


@pytest.mark.parametrize("op", ["norm", "norm_backward"])
def test_the_first_integer_of_a_schema_follows_its_tensors(op):
    """The public registration's cache key begins there."""
    arguments = getattr(torch.ops.tilenorm, op).default._schema.arguments
    tensors = [("Tensor" in str(a.type)) for a in arguments]
    first = next(i for i, a in enumerate(arguments) if isinstance(a.type, torch.IntType))
    assert arguments[first].name == "hidden" and first == tensors.index(False)


def test_without_the_private_names_the_public_registration_stands(monkeypatch):
    infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    monkeypatch.setitem(infos, torch.ops.tilenorm.norm.default, "public")
    with monkeypatch.context() as gone:
        gone.delattr(_op_schema, "RuntimeSchemaInfo")
        keep_every_argument((torch.ops.tilenorm.norm.default,))
        assert infos[torch.ops.tilenorm.norm.default] == "public"
    keep_every_argument((torch.ops.tilenorm.norm.default,))
    assert infos[torch.ops.tilenorm.norm.default].static_argnum == 0
