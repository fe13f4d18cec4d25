"""Heads that are normalised and rotated, through the public function and the ops."""

import pytest
import torch

import tilenorm
from tests.support.calls import Form, call, compare, random
from tests.support.drawn import heads_of
from tests.support.pretended import by, tensors_among
from tilenorm.launch.plan import plan_forward
from tilenorm.launch.target import Target
from tilenorm.ops.passes import cutile
from tilenorm.spec import NormSpec, Rotation

B = torch.bfloat16
DTYPES = (B, torch.float16, torch.float32)
LEAVES = ("input", "key", "weight", "key_weight")
NAME = "rms_norm_rope"
ROPE = Form(NAME)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_hugging_face(dtype, by_token, device):
    """The norms and the rotation of Qwen 3, of heads and of whole tokens, with rounding="early"."""
    from transformers.models.qwen3 import modeling_qwen3 as qwen3  # takes seconds

    given, heads = heads_of((2, 7), (4, 4), 32, 32, dtype), []
    if by_token:
        given |= {n: random(4, 32, dtype=dtype) for n in LEAVES[2:]}
    given = {name: t.to(device) for name, t in given.items()}
    for x, weight in zip(LEAVES[:2], LEAVES[2:], strict=True):
        norm = qwen3.Qwen3RMSNorm(given[weight].numel(), 1e-6).to(device, dtype)
        norm.weight.data = given[weight].flatten()
        rows = given[x].flatten(-2) if by_token else given[x]
        heads.append(norm(rows).view(given[x].shape).transpose(1, 2))
    expected = qwen3.apply_rotary_pos_emb(*heads, given["cos"][None], given["sin"][None])
    how = {"normalized_shape": given["weight"].shape, "output_heads_first": True}
    found = call(ROPE, given, **how, rounding="early")
    for got, wanted in zip(found, expected, strict=True):
        # On a GPU, rounded as assert_bits tells, and the products may cancel.
        near = 4 * torch.finfo(dtype).eps * wanted.abs().max().item() if got.is_cuda else 0
        torch.testing.assert_close(got, wanted, rtol=0, atol=near)


@pytest.mark.parametrize("heads_first", [False, True])
def test_projections_are_read_in_place(heads_first, monkeypatch):
    given = heads_of(dtype=B)
    if heads_first:
        given |= {n: given[n].transpose(1, 2) for n in LEAVES[:2]}
    with by("sm_90"):
        launch, read = cutile.launch, set()

        def seen(stream, launches, arrays):
            read.update(t.data_ptr() for t in tensors_among(arrays))
            launch(stream, launches, arrays)

        monkeypatch.setattr(cutile, "launch", seen)
        call(ROPE, given, heads_first=heads_first)
    assert {t.data_ptr() for t in given.values()} <= read


def test_positions_out_of_range(monkeypatch):
    """Checked in every call, warm ones too, where TILENORM_DEBUG asks for it."""
    given = heads_of() | {"positions": torch.tensor([0, 1, 4, 4, 2], dtype=torch.int32)}
    monkeypatch.setenv("TILENORM_DEBUG", "1")
    with by("sm_90"), torch.no_grad():
        call(ROPE, given)
        for wrong in (5, -1):
            positions = given["positions"].index_fill(0, torch.tensor([3]), wrong)
            with pytest.raises(IndexError, match="'positions' takes numbers from 0 to 4"):
                call(ROPE, given | {"positions": positions})


@pytest.mark.parametrize("wrong", (5, -1))
def test_positions_out_of_range_on_the_cpu(wrong):
    """Checked in every call, warm ones, compiled ones and those of the op too."""
    right = heads_of() | {"positions": torch.tensor([0, 1, 4, 4, 2])}
    given = right | {"positions": torch.tensor([0, 1, wrong, 4, 2])}
    message = rf"rms_norm_rope: argument 'positions' takes numbers from 0 to 4.*, got .*{wrong}"
    with torch.no_grad():
        for _ in range(2):
            call(ROPE, right)
            with pytest.raises(IndexError, match=message):
                call(ROPE, given)
        compiled = torch.compile(lambda given: call(ROPE, given), backend="eager")
        compiled(right)
        with pytest.raises(IndexError, match=message):
            compiled(given)


def test_symbolic_trace_of_heads_before_tokens():
    given = {n: t.transpose(1, 2) if n in LEAVES[:2] else t for n, t in heads_of().items()}
    traced = torch.fx.symbolic_trace(
        lambda x, cos, sin, key: tilenorm.rms_norm_rope(
            x, (16,), cos, sin, key=key, heads_first=True, rotary_dim=8
        )
    )
    last = [n for n in traced.graph.nodes if n.op == "call_function"][-1]
    assert last.target is tilenorm.rms_norm_rope
    plain = {n: given[n] for n in ("input", "cos", "sin", "key")}
    plain |= {n: plain[n][:, :8] for n in ("cos", "sin")}
    compare(
        traced(*plain.values()), call(ROPE, plain, eps=None, heads_first=True, rotary_dim=8), 0.0
    )


def test_several_sequences_of_more_elements_than_strides_hold():
    spec = NormSpec("rms", 64, "bfloat16", rotation=Rotation(64, 64))
    x = torch.empty(2, 1 << 25, 1, 64, dtype=torch.bfloat16, device="meta")
    cos = torch.empty(1 << 25, 64, device="meta")
    plan = plan_forward(spec, Target.of("sm_90"), False)
    of_shapes = cutile.bind_forward(plan)._layouts
    of_shapes.of((x[:1], cos, cos, None, None, None, None))
    with pytest.raises(NotImplementedError, match="less than 2147483648 elements"):
        of_shapes.of((x, cos, cos, None, None, None, None))
