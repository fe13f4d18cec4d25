"""When the rules for DTensors are registered: in this process and in new ones."""

import os

import pytest
import torch
from torch.distributed.tensor import DTensor, _op_schema

from tests.support.forks import failing
from tilenorm.ops.pytorch.torch_private import keep_every_argument

# In each use a process of its own, with one rank, first meets a DTensor.
BEFORE = """
import tempfile
import torch
import torch.distributed as dist

torch.set_num_threads(1)


def first(use):
    import tilenorm
    from tilenorm.spec import Options

    assert "torch.distributed.tensor" not in sys.modules, "importing tilenorm loads it"
    how = (*Options(8, "rms"), 1e-6)
    op, op_backward = torch.ops.tilenorm.add_rms_norm, torch.ops.tilenorm.norm_backward
    row = (None, None, None, 8, 0.0, "late", 1.0, 1e-6)
    tilenorm.rms_norm(torch.ones(4, 6, 8), (8,))
    op(*[torch.ones(4, 6, 8, device="meta")] * 2, None, None, *row, True)
    assert "torch.distributed.tensor" not in sys.modules, "a call of plain tensors loads it"

    from torch.distributed.tensor import Shard, distribute_tensor
    store = "file://" + tempfile.mkdtemp() + "/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.randn(4, 6, 8), mesh, [Shard(1)])
    w = distribute_tensor(torch.randn(8), mesh, [Shard(0)])
    used = {**globals(), **locals()}
    exec(use, used)
    assert used["y"].placements == (Shard(1),), used["y"].placements
    # A weight alone is no bias alone to DTensor's cache, which tells how to move them.
    for _ in range(2):  # the first call's key is older than the registration
        for parameters in ((w, None), (None, w), (None, None)):
            found = op(x, x, *parameters, *row, True)
            assert [t.placements[0] for t in found] == [Shard(1)] * 3
    dist.destroy_process_group()
"""
USES = (
    # The op of an inference tensor.
    """
with torch.inference_mode():
    y = op(x * 2, x, w, None, *row, False)[0]
""",
    # A function.
    "y = tilenorm.rms_norm(x.requires_grad_(), (8,), w).detach()",
    # The backward op.
    """
rstd = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
y = op_backward(x, None, x, None, w, None, None, rstd, *how, False, [True] * 5)[0]
""",
    # A compiled function.
    """
run = torch.compile(lambda x: tilenorm.rms_norm(x, (8,)), backend="aot_eager", fullgraph=True)
y = run(x)
""",
)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_first_use_registers_the_rules():
    assert failing(BEFORE, USES) == ""


@pytest.mark.parametrize("op", ["add_rms_norm", "norm_backward"])
def test_the_first_integer_of_a_schema_follows_its_tensors(op):
    """The public registration's cache key begins there."""
    arguments = getattr(torch.ops.tilenorm, op).default._schema.arguments
    tensors = [("Tensor" in str(a.type)) for a in arguments]
    first = next(i for i, a in enumerate(arguments) if isinstance(a.type, torch.IntType))
    assert arguments[first].name == "hidden" and first == tensors.index(False)


def test_without_the_private_names_the_public_registration_stands(monkeypatch):
    infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    monkeypatch.setitem(infos, torch.ops.tilenorm.rms_norm.default, "public")
    with monkeypatch.context() as gone:
        gone.delattr(_op_schema, "RuntimeSchemaInfo")
        keep_every_argument((torch.ops.tilenorm.rms_norm.default,))
        assert infos[torch.ops.tilenorm.rms_norm.default] == "public"
    keep_every_argument((torch.ops.tilenorm.rms_norm.default,))
    assert infos[torch.ops.tilenorm.rms_norm.default].static_argnum == 0
