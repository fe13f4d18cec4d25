"""patch(residual=True): blocks that add and normalise in one pass."""

import copy
import functools
import pickle
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import tilenorm
from tilenorm.integrations.patch.blocks import PatchedBlock
from tilenorm.integrations.patch.classes import UNREACHED
from tilenorm.ops import functional

from ..ops.helpers import random
from .model_rows import built

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
N = 24


class Block(nn.Module):
    """Two sums, of which one stands right before its norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.RMSNorm(N, eps=1e-6), nn.LayerNorm(N)

    def forward(self, x: Tensor, h: Tensor, *, twice: float = 2.0) -> tuple[Tensor, Tensor]:
        x = x + h
        residual = x
        x = self.norm(x)
        x = self.last(x + twice * residual)
        return x, residual


class InBranches(Block):
    def forward(self, x, h, *, twice=2.0):
        if twice > 0:
            total = x * 1 + h * 1
            y = self.norm(total)
        else:
            total, y = x, h
        return self.last(y + twice * total), total


def twice_as_large(forward):
    @functools.wraps(forward)
    def doubled(self, *args, **options):
        assert type(self).forward is not forward
        return tuple(2 * t for t in forward(self, *args, **options))

    return doubled


class Decorated(Block):
    @twice_as_large
    @twice_as_large
    def forward(self, x, h, *, twice=2.0):
        total = x + h
        y = self.norm(total)
        return y, total


class Directly(Block):
    def forward(self, x, h, *, twice=2.0):
        return self.last(self.norm(x * twice + h) + x), h


class WithSuper(Block):
    def forward(self, x, h):
        return super().forward(x, h)


class Apart(Block):
    def forward(self, x, h):
        total = x + h
        h = h * 2
        h = self.norm(total)
        return h, total


def made(cls: type[Block]) -> tuple[Block, Block, Tensor, Tensor]:
    """A block with patched norms, the same patched itself, and two inputs."""
    x, h = (random(5, N, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    return *copy.deepcopy(_made(cls)), x, h


@functools.cache
def _made(cls: type[Block]) -> tuple[Block, Block]:
    block = cls().bfloat16()
    for number, parameter in enumerate(block.parameters()):
        parameter.data.copy_(random(N, seed=number))
    patched = copy.deepcopy(block)
    tilenorm.patch(block)
    tilenorm.patch(patched, residual=True)
    return block, patched


@pytest.fixture
def sums():
    """How many calls add and normalise in one pass."""
    calls = []

    def counted(function, *args, **options):
        calls.append(function)
        return function(*args, **options)

    with ExitStack() as stack:
        for name in ("add_rms_norm", "add_layer_norm"):
            replaced = partial(counted, getattr(functional, name))
            stack.enter_context(mock.patch.object(functional, name, replaced))
        yield calls


def outputs(block, *tensors, **options) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    found = block(*leaves, **options)
    grads = torch.autograd.grad([t.float().square().sum() for t in found], leaves)
    return [*found, *grads]


@pytest.mark.parametrize("cls", [Block, InBranches, Decorated, Directly])
def test_outputs_have_the_same_bits(cls, sums):
    block, patched, x, h = made(cls)
    expected, got = outputs(block, x, h, twice=3.0), outputs(patched, x, h, twice=3.0)
    assert len(sums) == (1 if cls is Decorated else 2)
    for a, b in zip(got[:2], expected[:2], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(got[2:], expected[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * b.abs().max().item())


# What one pass does not give: changes of the block, the patched one and h, which run as before.
AS_BEFORE = {
    "shape": lambda block, patched, h: h[:1],
    "dtype": lambda block, patched, h: (block.float(), patched.float(), h.float())[2],
    "number": lambda block, patched, h: 2.0,
    "parameter": lambda block, patched, h: (block.norm.float(), patched.norm.float(), h)[2],
    "hook": lambda block, patched, h: patched.norm.register_forward_hook(lambda *_: None) and h,
    "own forward": lambda block, patched, h: (
        setattr(patched.norm, "forward", partial(patched.norm.forward)) or h
    ),
}


@pytest.mark.parametrize("change", AS_BEFORE.values(), ids=AS_BEFORE)
def test_what_one_pass_does_not_give_runs_as_before(change, sums):
    block, patched, x, h = made(Block)
    h = change(block, patched, h)
    torch.testing.assert_close(patched(x, h), block(x, h), rtol=0, atol=0)
    # The second sum is that of two outputs. nn.RMSNorm's output has the input's dtype.
    assert len(sums) == 1 + (change is AS_BEFORE["parameter"])


def test_undo_copy_and_pickle():
    block = Block()
    report = tilenorm.patch(block, residual=True)
    assert "Block runs the sum before last and norm with the norm" in str(report)
    for again in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert type(again) is type(block) and isinstance(again, (Block, PatchedBlock))
    assert type(block).__name__ == "Block" and type(block).forward.__doc__ is None
    report.undo()
    assert type(block) is Block


def replaced_forward():
    block = Block()
    block.forward = lambda x, h: (x, h)
    return block


@pytest.mark.parametrize(
    "make, reason",
    [(WithSuper, "super()"), (Apart, "no sum of two terms stands"), (replaced_forward, UNREACHED)],
)
def test_a_block_that_is_left_says_why(make, reason):
    block = make()
    cls = type(block)
    report = tilenorm.patch(block, residual=True)
    assert type(block) is cls and len(report.patched) == 2
    [entry] = report.left
    assert entry.cls is cls and reason in entry.reason


def test_a_wrapper_that_passes_attributes_on_keeps_its_forward(sums):
    """As peft's: it has the norm's attributes, and another forward."""

    class Passes(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.inner = norm

        def __getattr__(self, name):
            return getattr(self._modules["inner"], name)

        def forward(self, x):
            return -self._modules["inner"](x)

    block, patched, x, h = made(Block)
    for model in (block, patched):
        model.norm = Passes(model.norm)
    assert all(map(torch.equal, patched(x, h), block(x, h))) and len(sums) == 1


def test_compiled_in_one_graph(dynamo):
    block, patched, x, h = made(Block)
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(x, h), block(x, h)))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_layers_of_transformers(name, sums):
    model = built(name).bfloat16()
    patched = copy.deepcopy(model)
    tilenorm.patch(model)
    tilenorm.patch(patched, residual=True)
    ids = torch.randint(0, 100, (2, 12))
    with torch.no_grad():
        assert torch.equal(patched(ids)[0], model(ids)[0])
    assert len(sums) == (4 if name == "bert" else 2)
