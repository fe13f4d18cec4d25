"""Heads that are normalised and rotated, through the public function and the ops."""

from random import Random

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3 as qwen3

import tilenorm
from tests import layouts
from tilenorm.launch.plan import plan_forward
from tilenorm.launch.target import Target
from tilenorm.ops.passes import cutile
from tilenorm.spec import NormSpec, Rotation
from tilenorm.tools.explain import explain_spec, planned_device

from .helpers import NEEDS_GPU, Form, call, gradients_like, random, same, slow, step
from .pretended import by, tensors_among
from .test_modulated import compare

B, F32, D = torch.bfloat16, torch.float32, torch.float64
DTYPES = (B, torch.float16, F32)
SERVED = ("reference", "sm_80", "sm_90")
LEAVES = ("input", "key", "weight", "key_weight")
NAME = "rms_norm_rope"
ROPE = Form(NAME)


def made(
    tokens=(2, 5), heads=(4, 2), head=16, columns=16, dtype=F32, weight=None, table=None, on="cpu"
) -> dict:
    """The tensors of a call by their names: queries and keys are views of one projection. heads:
    of queries and of keys, 0 without a key. columns: of the tables, whose rows are those of the
    last dimension of the tokens.
    """
    queries, keys = heads
    packed = random(*tokens, queries + 2 * keys, head, dtype=dtype, device=on)
    found = {"input": packed[..., :queries, :], "key": packed[..., queries : queries + keys, :]}
    for i, name in enumerate(("weight", "key_weight")):
        found[name] = random(head, dtype=weight or dtype, device=on, seed=1 + i)
    for i, name in enumerate(("cos", "sin")):
        found[name] = random(tokens[-1], columns, dtype=table or dtype, device=on, seed=3 + i)
    return {name: t for name, t in found.items() if keys or "key" not in name}


def in_double(given, found, **options):
    """What `step` should give: by the reference. The kernels are held to an oracle, too."""
    there = {n: t.cpu() for n, t in given.items()}
    exact = {n: t if n == "positions" else t.to(D) for n, t in there.items()}
    outputs = [found[name].cpu() for name in ("output", "sum") if name in found]
    incoming = [dy.to(D) for dy in gradients_like(outputs)]
    return step(ROPE, exact, incoming, leaves_in(given), **options)


def leaves_in(given) -> list[str]:
    return [name for name in LEAVES if name in given]


def drawn(rng: Random, device: str) -> tuple[dict, dict]:
    """The tensors of a call, and its options."""
    tokens = rng.choice(((1,), (9,), (2, 5), (3, 1), (2, 3, 3)))
    heads, head = rng.choice(((4, 2), (3, 0), (1, 1), (2, 3), (5, 1))), rng.choice((6, 16, 40, 64))
    dim = rng.choice((None, None, head // 4 * 2, 2))
    columns = (dim or head) // rng.choice((1, 2))
    dtype, weight, table = (rng.choice(DTYPES) for _ in range(3))
    given = made(tokens, heads, head, columns, dtype, weight, table, device)
    options = {"rotary_dim": dim, "interleaved": rng.random() < 0.5, "eps": 1e-6}
    if rng.random() < 0.3:
        given = {name: t for name, t in given.items() if "weight" not in name}
    elif rng.random() < 0.3:
        options["offset"] = 1.0
    if rng.random() < 0.3 and heads != (1, 1):
        options["normalized_shape"] = heads[0], head
        for name, count in (("weight", heads[0]), ("key_weight", heads[1])):
            if name in given:
                given[name] = random(count, head, dtype=weight, device=device, seed=9)
    match rng.choice(("rows", "every row", "positions", "some positions")):
        case "every row":
            for i, name in enumerate(("cos", "sin")):
                given[name] = random(*tokens, columns, dtype=table, device=device, seed=11 + i)
        case "positions":
            kind = rng.choice((torch.int32, torch.int64))
            given["positions"] = torch.arange(tokens[-1]).flip(0).to(device, kind)
        case "some positions":
            last = (torch.arange(tokens[0]) % tokens[-1]).reshape(-1, *[1] * (len(tokens) - 1))
            given["positions"] = last.to(device)
    if len(tokens) == 2:
        options["output_heads_first"] = rng.choice((None, False, True))
        options["heads_first"] = rng.random() < 0.5
    return given, options


@pytest.mark.any_torch
@pytest.mark.parametrize(
    "served, calls",
    [("reference", 32), ("sm_90", 4), *slow(("sm_80", 4), ("sm_90", 32))]
    + [pytest.param("cuda", 64, marks=NEEDS_GPU)],
)
def test_drawn_calls(served, calls):
    """Accurate, and of the same bits wherever the tensors lie, in warm calls as in cold ones."""
    rng, device = Random(f"rope {served} {calls}"), "cuda" if served == "cuda" else "cpu"
    for _ in range(calls):
        given, options = drawn(rng, device)
        turned, dtype = given, given["input"].dtype
        if options.get("heads_first"):
            turned = given | {n: given[n].transpose(1, 2) for n in ("input", "key") if n in given}
        there = {n: t for n, t in turned.items() if n != "positions"}
        moved = {n: layouts.draw(rng, tuple(t.shape), False).filled(t) for n, t in there.items()}
        with by(served, device):
            found = step(ROPE, turned, asked=leaves_in(given), **options)
            for again in (turned | moved, turned, turned):
                assert same(step(ROPE, again, asked=leaves_in(given), **options), found)
            with torch.no_grad():
                plain = call(ROPE, turned, **options)
        assert all(map(torch.equal, plain, found.values()))
        assert all(t.is_contiguous() and t.dtype == dtype for t in plain)
        assert all(found[name].dtype == given[name].dtype for name in leaves_in(given))
        for name, exact in in_double(turned, found, **options).items():
            compare([found[name].cpu()], [exact], 1e-5 if found[name].dtype == F32 else 2e-2)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_hugging_face(dtype, by_token, device):
    """The norms and the rotation of Qwen 3, of heads and of whole tokens, with rounding="early"."""
    given, heads = made((2, 7), (4, 4), 32, 32, dtype, on=device), []
    if by_token:
        given |= {n: random(4, 32, dtype=dtype, device=device) for n in LEAVES[2:]}
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
    given = made(dtype=B)
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
    given = made() | {"positions": torch.tensor([0, 1, 4, 4, 2], dtype=torch.int32)}
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
    right = made() | {"positions": torch.tensor([0, 1, 4, 4, 2])}
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
    given = {n: t.transpose(1, 2) if n in LEAVES[:2] else t for n, t in made().items()}
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


def test_explained(capsys):
    given = made((2, 5), (4, 2), 16, 8, B) | {"positions": torch.arange(5)}
    given |= {n: given[n].transpose(1, 2) for n in LEAVES[:2]}
    found = tilenorm.explain(NAME, given.pop("input"), (16,), heads_first=True, **given)
    assert "16 of 16 elements rotated by halves, tables bfloat16 of 8" in capsys.readouterr().out
    assert found.spec.rotation.heads_first and found.rows == 40
    # Queries, keys and what they become; weights; tables of 5 rows; positions of 10 tokens.
    assert found.forward_bytes == 2 * 2 * 60 * 16 + 2 * 2 * 16 + 2 * 2 * 5 * 8 + 10 * 8
    explained = explain_spec(found.spec, 24, planned_device("sm_90"))
    assert [s.kernel for s in explained.backward] == ["rope_backward", "column_sum"]


def test_several_sequences_of_more_elements_than_strides_hold():
    spec = NormSpec("rms", 64, "bfloat16", rotation=Rotation(64, 64))
    x = torch.empty(2, 1 << 25, 1, 64, dtype=torch.bfloat16, device="meta")
    cos = torch.empty(1 << 25, 64, device="meta")
    plan = plan_forward(spec, Target.of("sm_90"), False)
    of_shapes = cutile.bind_forward(plan)._layouts
    of_shapes.of((x[:1], cos, cos, None, None, None, None))
    with pytest.raises(NotImplementedError, match="less than 2147483648 elements"):
        of_shapes.of((x, cos, cos, None, None, None, None))
