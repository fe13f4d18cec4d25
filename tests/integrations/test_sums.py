"""patch with residual: sums inside of the next statement, and what may stand before the norm."""

import contextlib
import copy
from functools import partial

import pytest
import torch

import tilenorm
from tests.support.calls import name_of, random
from tilenorm.integrations.patch.blocks import patched_block
from tilenorm.integrations.patch.twin import Unrecognised

from .client_blocks import BLOCKS, LitGPT, TitanQwen, Torchtune, WhisperDecoder
from .drawn_blocks import Drawing, Observed, ran
from .graphs import step
from .norms import N


@pytest.mark.parametrize("cls", BLOCKS, ids=name_of)
def test_blocks_of_clients_have_the_same_bits(cls, passes):
    block = cls().bfloat16()
    for number, parameter in enumerate(block.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=number))
    patched = copy.deepcopy(block)
    tilenorm.patch(block)
    report = tilenorm.patch(patched, residual=True)
    assert not report.left and "with the norm, wherever its forward" in str(report)
    x = random(3, 5, N, dtype=torch.bfloat16, seed=9)
    (like, *expected), (y, *got) = (step(m, (x,)) for m in (block, patched))
    assert len(passes) == BLOCKS[cls] and torch.equal(y, like)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * b.abs().max().item())


@pytest.mark.parametrize("cls", [Torchtune, WhisperDecoder, LitGPT], ids=name_of)
def test_blocks_of_clients_compile_in_one_graph(cls, dynamo, passes):
    block, x = cls(), random(3, N)
    tilenorm.patch(block, residual=True)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), block(x)) and len(passes) == 2 * BLOCKS[cls]


def test_an_option_without_the_sum(passes):
    block, x = LitGPT(parallel=True), random(3, N)
    expected = block(x)
    tilenorm.patch(block, residual=True)
    torch.testing.assert_close(block(x), expected)
    assert not passes


def test_a_norm_is_chosen_where_the_sum_stands(passes):
    """The test is asked again for each call."""
    block, x = WhisperDecoder(), random(3, N)
    tilenorm.patch(block, residual=True)
    block(x)
    block.cross_attn = None
    block(x)
    block.cross_attn = torch.nn.Sequential()  # its truth is what its __len__ says
    block(x)
    assert passes == ["add_layer_norm"] * 3


def test_a_hook_runs_where_it_ran(passes):
    """It changes what the forward reads behind the norm."""

    def hook(norm, inputs, output):
        block.moe_enabled = "changed"

    block, x = TitanQwen(), random(3, N)
    tilenorm.patch(block, residual=True)
    block.ffn_norm.register_forward_hook(hook)
    block(x)
    assert block.moe_enabled == "changed" and not passes


class FlagAssignedBetween(WhisperDecoder):
    def forward(self, x, flag=True):
        x = x + self.attn(x)[0]
        flag = not_asked
        if flag is None:
            return self.cross_attn_ln(x)
        return self.mlp_ln(x)


not_asked = None


def test_a_variable_that_is_assigned_behind_the_sum_chooses_no_norm(passes):
    block, x = FlagAssignedBetween(), random(3, N)
    block.cross_attn_ln.weight.data.fill_(2)
    expected = block(x)
    tilenorm.patch(block, residual=True)
    torch.testing.assert_close(block(x), expected)
    assert not passes


class OwnLookup(TitanQwen):
    def __getattr__(self, name):
        return super().__getattr__(name)


def test_a_class_that_says_what_its_attributes_are_is_left():
    report = tilenorm.patch(OwnLookup(), residual=True)
    reason = "its forward has no sum right before a patched norm"
    assert [entry.reason for entry in report.left] == [reason]


@pytest.mark.parametrize("start", [0, pytest.param(120, marks=pytest.mark.slow)])
def test_drawn_blocks_do_the_same_in_the_same_order(start, tmp_path, passes):
    inputs = [random(3, N, seed=seed) for seed in range(3)]
    like = Observed()
    tilenorm.patch(like)
    rewritten = fused = 0
    for seed in range(start, start + 120):
        source = Drawing(seed).source()
        file, methods = tmp_path / f"{seed}.py", {"torch": torch}
        file.write_text(source)
        exec(compile(source, file, "exec"), methods)
        like.__class__ = cls = type("Drawn", (Observed,), {"forward": methods["forward"]})
        hooked = []
        if seed % 3 == 0:
            hooked = [like.norm.register_forward_hook(partial(seen, like))]
        expected = ran(like, inputs)
        passes.clear()
        with contextlib.suppress(Unrecognised):
            like.__class__ = patched_block(cls, ("norm", "last"), ("residual",))
            got = ran(like, inputs)
            rewritten, fused = rewritten + 1, fused + len(passes)
            assert got[1] == expected[1], source
            for a, b in zip((*got[0], *got[2]), (*expected[0], *expected[2]), strict=True):
                assert (a is None) == (b is None), source
                if a is not None:
                    size = b.abs().max().item()
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * size, equal_nan=True)
        for hook in hooked:
            hook.remove()
    assert rewritten > 30 and fused > rewritten / 2


def seen(block, norm, inputs, output):
    block.log.append("norm")
    block.flag = not block.flag
