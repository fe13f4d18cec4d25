"""patch with residual, modulation and rotation: blocks that compute more in the pass of a norm."""

import contextlib
import copy
import functools
import pickle
from random import Random

import pytest
import torch
from torch import Tensor, nn
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as rotate_and_cast
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

import tilenorm
from tests.support.calls import name_of, random
from tilenorm.integrations.patch.blocks import patched_block
from tilenorm.integrations.patch.classes import UNREACHED, PatchedModule
from tilenorm.integrations.patch.twin import Unrecognised

from .graphs import step
from .modulations import BATCH, TOKENS, N

BF16 = torch.bfloat16
EVERYTHING = {"residual": True, "modulation": True, "rotation": True}


class Sums(nn.Module):
    """Two sums, of which one stands right before its norm."""

    SHAPES = (5, N), (5, N)

    def __init__(self):
        super().__init__()
        self.norm, self.last = Qwen3RMSNorm(N), nn.LayerNorm(N)

    def forward(self, x: Tensor, h: Tensor, *, twice: float = 2.0) -> tuple[Tensor, Tensor]:
        x = x + h
        residual = x
        x = self.norm(x)
        x = self.last(x + twice * residual)
        return x, residual


def twice_as_large(forward):
    @functools.wraps(forward)
    def doubled(self, *args, **options):
        assert type(self).forward is not forward
        return tuple(2 * t for t in forward(self, *args, **options))

    return doubled


class Decorated(Sums):
    @twice_as_large
    @twice_as_large
    def forward(self, x, h, *, twice=2.0):
        total = x + h
        y = self.norm(total)
        return y * twice, total


class Modulated(nn.Module):
    """Right behind a sum, as in Flux and HunyuanVideo."""

    SHAPES = (BATCH, TOKENS, N), (BATCH, TOKENS, N), (BATCH, 1, N), (BATCH, 1, N)

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.LayerNorm(N), nn.RMSNorm(N)

    def forward(self, x, h, scale, shift):
        x = x + h
        y = self.norm(x)
        y = shift + (scale + 1.0) * y
        return y, x


class Rotated(nn.Module):
    SHAPES = (2, 5, 4, 16), (2, 5, 2, 16), (2, 5, 16), (2, 5, 16)

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = Qwen3RMSNorm(16), Qwen3RMSNorm(16)

    def forward(self, q, k, cos, sin):
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k


class RotatedAndCast(Rotated):
    def forward(self, q, k, cos, sin):
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        q, k = rotate_and_cast(q, k, cos, sin)
        return q, k


def made(cls: type[nn.Module]) -> tuple:
    """A block with patched norms, the same patched itself, and its inputs."""
    inputs = (random(*shape, dtype=BF16, seed=seed) for seed, shape in enumerate(cls.SHAPES))
    return *copy.deepcopy(_made(cls)), *inputs


@functools.cache
def _made(cls: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    block = cls().bfloat16()
    for number, parameter in enumerate(block.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=number))
    patched = copy.deepcopy(block)
    tilenorm.patch(block)
    tilenorm.patch(patched, **EVERYTHING)
    return block, patched


@pytest.mark.parametrize("cls, count", [(Sums, 2), (Decorated, 1)], ids=name_of)
def test_sums_have_the_same_bits(cls, count, passes):
    block, patched, x, h = made(cls)
    expected, got = (step(functools.partial(m, twice=3.0), (x, h)) for m in (block, patched))
    assert len(passes) == count
    for a, b in zip(got[:2], expected[:2], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(got[2:], expected[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * b.abs().max().item())


STATEMENTS = (
    "{0} = {1}",
    "{0} = {1} + {2}",
    "{0} = self.norm({1})",
    "{0} = self.last({1} + {2})",
    "{0} = {0} * (1 + {1}) + {2}",
    "{0} = {1} + (2 * {2} + 1) * {0}",
    "{0} = self.norm({1}) * (1 + {2}) + {3}",
    "if {0} is not {1}:\n        {2} = {3} + {0}\n        {1} = self.last({2})",
)


@pytest.mark.parametrize("kinds", [("residual",), ("modulation",), ("modulation", "residual")])
def test_drawn_forwards_compute_the_same(kinds, tmp_path, passes):
    """A rewritten forward gives what it gave, whatever its statements assign to what."""
    rng, block, rewritten = Random(0), made(Sums)[0].float(), 0
    tensors = [random(5, N, seed=seed) for seed in range(3)]
    for number in range(100):
        drawn = [rng.choice(STATEMENTS) for _ in range(rng.randrange(2, 8))]
        lines = [line.format(*rng.choices("xab", k=4)) for line in drawn]
        source = "\n    ".join(["def forward(self, x, a, b):", *lines, "return x, a, b"])
        file, methods = tmp_path / f"{number}.py", {}
        file.write_text(source)
        exec(compile(source, file, "exec"), methods)
        block.__class__ = cls = type("Drawn", (Sums,), methods)
        expected = block(*tensors)
        with contextlib.suppress(Unrecognised):
            block.__class__ = patched_block(cls, ("norm", "last"), kinds)
            rewritten += 1
            torch.testing.assert_close(block(*tensors), expected, rtol=1e-4, atol=1e-4)
    assert rewritten > 30 and len(passes) > rewritten


GROUPS = (BATCH, 1), (BATCH, TOKENS), (1, 1), ()


@pytest.mark.parametrize("alike, shape", [(False, ()), *((True, s) for s in GROUPS)])
def test_sum_and_modulation_by_group(alike, shape, passes):
    """The sum has the same bits. Terms of two shapes are added as before."""
    block, patched, x, h, *_ = made(Modulated)
    h, by_group = h if alike else h[:1], [random(*shape, N, dtype=BF16, seed=i) for i in (5, 6)]
    (y, s), (like, total) = patched(x, h, *by_group), block(x, h, *by_group)
    assert torch.equal(s, total) and s.dtype == total.dtype and y.dtype == like.dtype
    torch.testing.assert_close(y, like, rtol=2**-6, atol=2**-5)
    assert len(passes) == 1


def hooked(block, *inputs) -> tuple:
    next(block.children()).register_forward_hook(lambda *_: None)
    return inputs


def widened(block, *inputs) -> tuple:
    block.float()
    return inputs


def with_own_forward(block, *inputs) -> tuple:
    block.norm.forward = functools.partial(block.norm.forward)
    return inputs


class PassesOn(nn.Module):
    """As peft's wrappers: it has the norm's attributes, and another forward."""

    def __init__(self, norm):
        super().__init__()
        self.inner = norm

    def __getattr__(self, name):
        return getattr(self._modules["inner"], name)

    def forward(self, x):
        return -self._modules["inner"](x)


def wrapped(block, *inputs) -> tuple:
    block.norm = PassesOn(block.norm)
    return inputs


def with_another_eps(block, *inputs) -> tuple:
    block.k_norm.variance_epsilon = 1e-2
    return inputs


OTHER = random(1, TOKENS, N, dtype=BF16)
# Changes of a block and of its inputs, which one pass does not compute.
CHANGES = {
    Sums: {
        "two shapes": lambda m, x, h: (x, h[:1]),
        "two dtypes": lambda m, x, h: m.float() and (x, h.float()),
        "number": lambda m, x, h: (x, 2.0),
        "hook": hooked,
        "wide weights": widened,
        "own forward": with_own_forward,
        "wrapper": wrapped,
    },
    Modulated: {
        "not by group": lambda m, x, h, a, b: (x, h, OTHER, OTHER),
        "two shapes": lambda m, x, h, a, b: (x, h, a, b[:1]),
        "promoted": lambda m, x, h, a, b: (x, h, a.float(), b),
        "numbers": lambda m, x, h, a, b: (x, h, 0.5, 2.0),
        "other rows": lambda m, x, h, a, b: (x[:, :BATCH], h[:, :BATCH], a[:, 0], b[:, 0]),
        "float64": lambda m, *inputs: m.double() and tuple(map(Tensor.double, inputs)),
        "hook": hooked,
    },
    Rotated: {
        "hook": hooked,
        "wide weights": widened,
        "another eps": with_another_eps,
        "wide tables": lambda m, q, k, *t: (q, k, *map(Tensor.float, t)),
        "tables with gradients": lambda m, q, k, *t: (q, k, *map(Tensor.requires_grad_, t)),
        "half a head": lambda m, q, k, cos, sin: (q, k, cos[..., :1], sin[..., :1]),
    },
    RotatedAndCast: {"float64 tables": lambda m, q, k, *t: (q, k, *map(Tensor.double, t))},
}


CASES = {f"{cls.__name__}, {what}": (cls, what) for cls in CHANGES for what in CHANGES[cls]}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_runs_as_before(case, passes):
    """With the same bits. The other norm of Sums makes its pass, but for wide weights."""
    (cls, what), (block, patched, *inputs) = case, made(case[0])
    expected, got = (m(*CHANGES[cls][what](m, *inputs)) for m in (block, patched))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert len(passes) == (cls is Sums and what != "wide weights")


class WithSuper(Sums):
    def forward(self, x, h):
        return super().forward(x, h)


class SumElsewhere(Sums):
    def forward(self, x, h):
        total = x + h
        h = h * 2
        h = self.norm(total)
        return h, total


class ModulatedElsewhere(Modulated):
    """The norm's output is used besides, or is that of another tensor."""

    def forward(self, x, h, scale, shift):
        z = self.norm(x)
        y = z * (1 + scale) + shift
        z = self.last(z)
        z = z * (1 + z)
        return y, z


class UsedBesides(Rotated):
    def forward(self, q, k, cos, sin):
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        v = k + 1
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k, v


def turned(q, k, cos, sin):
    return q * cos[:, None], k * sin[:, None]


class NoRotation(Rotated):
    def forward(self, q, k, cos, sin):
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        q, k = turned(q, k, cos, sin)
        return q, k


def replaced_forward():
    block = Sums()
    block.forward = lambda x, h: (x, h)
    return block


NOTHING = (
    "no sum right before or modulation right behind or rotation of heads behind a patched norm"
)
LEFT = [
    (WithSuper, "super()"),
    (SumElsewhere, NOTHING),
    (ModulatedElsewhere, NOTHING),
    (UsedBesides, NOTHING),
    (NoRotation, NOTHING),
    (replaced_forward, UNREACHED),
]


@pytest.mark.parametrize("make, reason", LEFT)
def test_a_block_that_is_left_says_why(make, reason):
    block = make()
    cls = type(block)
    report = tilenorm.patch(block, **EVERYTHING)
    assert type(block) is cls and len(report.patched) == 2
    [entry] = report.left
    assert entry.cls is cls and reason in entry.reason


HOW = {
    Sums: "the sum before last and norm",
    Modulated: "the sum before norm and the modulation of norm",
    Rotated: "the rotation of q_norm and k_norm",
}


@pytest.mark.parametrize("cls", HOW)
def test_report_undo_copy_and_pickle(cls):
    block, *inputs = cls().bfloat16(), *made(cls)[2:]
    report = tilenorm.patch(block, **EVERYTHING)
    assert f"{cls.__name__} runs {HOW[cls]} with the norm" in str(report)
    for again in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert type(again) is type(block) and isinstance(again, PatchedModule)
        assert all(map(torch.equal, again(*inputs), block(*inputs)))
    assert type(block).__name__ == cls.__name__ and type(block).forward.__doc__ is None
    report.undo()
    assert type(block) is cls


@pytest.mark.parametrize("cls", [Sums, Modulated, Rotated])
def test_compiled_in_one_graph(cls, dynamo, passes):
    """With the same bits, where the pass rounds as the block does."""
    block, patched, *inputs = made(cls)
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(*inputs), patched(*inputs))) and len(passes) > 0
    assert cls is Modulated or all(map(torch.equal, patched(*inputs), block(*inputs)))
