"""Calls of norms with what surrounds them in few models: graphs, the op, wrong arguments."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import tilenorm
from tilenorm.ops import dispatch
from tilenorm.ops.tensors import Tensors
from tilenorm.spec import PLAIN, Options

from .helpers import EACH_DEVICE, EACH_JOINED, EPS, call, random, same, step, tensors_of
from .test_neighbours import DTYPES, N, made

pytestmark = EACH_DEVICE


@EACH_JOINED
@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2]], ids=str)
def test_compiled_the_same_bits_without_recompiling(device, form, dtypes, dynamo):
    backend = "inductor" if device == "cuda" else "aot_eager"
    run = torch.compile(lambda t: call(form, t), fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 16, 17):
        tensors = made(form, rows, N, dtypes=dtypes, device=device)
        with dynamo.config.patch(error_on_recompile=rows != 3):
            got = step(form, tensors, function=lambda _, t: run(t))
        assert same(got, step(form, tensors)), rows


@EACH_JOINED
def test_a_graph_has_one_op_each_way(device, form):
    tensors = {n: t.requires_grad_() for n, t in tensors_of(form, 3, N, device=device).items()}

    def run(*given):
        outputs = call(form, dict(zip(tensors, given, strict=True)))
        return torch.autograd.grad(sum(y.square().sum() for y in outputs), given)

    graph = make_fx(run)(*tensors.values()).graph
    targets = [node.target for node in graph.nodes]
    ops = torch.ops.tilenorm
    assert targets.count(ops.norm.default) == targets.count(ops.norm_backward.default) == 1


def op_arguments(form, tensors, save=True):
    given = [tensors.get(name) for name in Tensors._fields]
    norm = "layer" if "layer" in form.op else "rms"
    how = (*Options(tensors["input"].shape[-1], norm), EPS, save)
    return *given[:PLAIN], *how, None, *given[PLAIN:]


@EACH_JOINED
@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2]], ids=str)
def test_opcheck(device, form, dtypes):
    tensors = made(form, 3, N, dtypes=dtypes, device=device)
    tensors = {n: t.requires_grad_() for n, t in tensors.items()}
    opcheck(torch.ops.tilenorm.norm.default, op_arguments(form, tensors))
    without = op_arguments(form, {n: t.detach() for n, t in tensors.items()}, save=False)
    opcheck(torch.ops.tilenorm.norm.default, without)


@EACH_JOINED
def test_the_op_takes_the_last_tensors_by_name(device, form):
    arguments = op_arguments(form, tensors_of(form, 3, N, device=device))
    first, names = len(arguments) - len(Tensors._fields[PLAIN:]), Tensors._fields[PLAIN:]
    by_name = dict(zip(names, arguments[first:], strict=True))
    norm = torch.ops.tilenorm.norm
    for found, expected in zip(norm(*arguments[:first], **by_name), norm(*arguments), strict=True):
        assert torch.equal(found, expected)


@EACH_JOINED
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_call_is_remembered(device, form, monkeypatch):
    seen, original = [], dispatch._checked
    monkeypatch.setattr(dispatch, "_checked", lambda op, *a: seen.append(op) or original(op, *a))
    tensors = tensors_of(form, 5, N, device=device)
    expected = step(form, tensors)
    for rows in (5, 7, 1):
        given = tensors_of(form, rows, N, device=device)
        assert same(step(form, given), step(form, given, backend=None)) and len(seen) == 1
    assert same(step(form, tensors), expected) and len(seen) == 1
    # The same tensors, but one of them, or all of them, with another meaning.
    plain = {n: t for n, t in tensors.items() if n not in form.before}
    assert torch.equal(call(form, plain)[1], plain["input"] + plain["residual"])
    for name in form.names[1:-2]:
        with pytest.raises(RuntimeError, match="takes the input's shape"):
            call(form, tensors | {name: tensors[name][:3]})


@EACH_JOINED
@pytest.mark.parametrize("kind", [tuple, list])
def test_a_sequence_of_any_kind(device, form, kind):
    tensors = tensors_of(form, 5, N, device=device)
    x, a, r, w, b = tensors.values()
    function, how = getattr(tilenorm, form.op), {"weight": w, "bias": b, "eps": EPS}
    found = function(x, kind((a, r)), (N,), **how)
    assert all(map(torch.equal, found, call(form, tensors)))
    one = function(x, kind((r,)), (N,), **how)
    assert all(map(torch.equal, one, function(x, r, (N,), **how)))


WRONG = {
    "three": (lambda x: (x, x, x), TypeError, "one or two Tensors, got .Tensor, Tensor, Tensor."),
    "none": (lambda x: (), TypeError, r"one or two Tensors, got \[\]"),
    "no tensors": (lambda x: (1.0, x), TypeError, r"one or two Tensors, got \[float, Tensor\]"),
    "a dtype between": (
        lambda x: (x.half(), x.bfloat16()),
        RuntimeError,
        r"'residual\[0\]' takes the dtype of the input or of residual\[1\],"
        " torch.float32 or torch.bfloat16, got torch.float16",
    ),
    "a shorter first": (lambda x: (x[:2], x), RuntimeError, r"'residual\[0\]' takes the input's"),
    "a shorter last": (lambda x: (x, x[:2]), RuntimeError, r"'residual\[1\]' takes the input's"),
    "ints": (lambda x: (x.int(), x), NotImplementedError, r"'residual\[0\]' takes float16"),
    "elsewhere": (lambda x: (x.to("meta"), x), RuntimeError, r"'residual\[0\]' .* device"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("op", ["add_rms_norm", "add_layer_norm"])
def test_wrong_sequences(device, op, what):
    make, kind, message = WRONG[what]
    x = random(5, N, device=device)
    for function in (getattr(tilenorm, op), lambda *given: tilenorm.explain(op, *given)):
        with pytest.raises(kind, match=f"{op}: argument .*{message}"):
            function(x, make(x), (N,))


@pytest.mark.parametrize("op", ["rms_norm", "gated_layer_norm"])
def test_other_functions_take_no_sequence(device, op):
    x = random(5, N, device=device)
    with pytest.raises(TypeError):
        getattr(tilenorm, op)(x, (x, x), (N,))


def test_what_the_op_refuses(device):
    x, how = random(5, N, device=device), (*Options(N, "rms"), EPS, False, None)
    norm = torch.ops.tilenorm.norm
    with pytest.raises(NotImplementedError, match="an addend needs a residual"):
        norm(x, None, None, None, None, *how, x)
    with pytest.raises(NotImplementedError, match="a gate takes no addend"):
        norm(x, x, x, None, None, *how, x)
    with pytest.raises(NotImplementedError, match="an addend of a third dtype has fewer bits"):
        norm(x.half(), x.bfloat16(), None, None, None, *how, x)


@EACH_JOINED
def test_nested(device, form):
    tensors = tensors_of(form, 3, N, device=device)
    offsets = torch.tensor([0, 2, 2, 3], device=device)

    def nested(_, given):
        rows = {
            n: torch.nested.nested_tensor_from_jagged(t, offsets)
            for n, t in given.items()
            if n not in ("weight", "bias")
        }
        return tuple(y.values() for y in call(form, given | rows))

    assert same(step(form, tensors, function=nested), step(form, tensors))
    dense = dict(tensors)
    dense["input"] = torch.nested.nested_tensor_from_jagged(tensors["input"], offsets)
    dense["residual"] = torch.nested.nested_tensor_from_jagged(tensors["residual"], offsets)
    with pytest.raises(RuntimeError, match=r"'residual\[0\]' takes a nested tensor"):
        call(form, dense)


@EACH_JOINED
def test_a_mode_sees_the_public_function_with_its_arguments(device, form):
    seen = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is getattr(tilenorm, form.op):
                seen.append(args)
            return function(*args, **(kwargs or {}))

    tensors = tensors_of(form, 3, N, device=device)
    expected = call(form, tensors)
    with Seen():
        found = call(form, tensors)
    assert all(map(torch.equal, found, expected))
    ((x, residual, shape),) = seen
    assert x is tensors["input"] and shape == (N,)
    assert residual[0] is tensors["addend"] and residual[1] is tensors["residual"]


@EACH_JOINED
def test_a_traced_graph_calls_the_public_function(device, form):
    tensors = tensors_of(form, 3, N, device=device)

    def run(x, a, r):
        return getattr(tilenorm, form.op)(x, (a, r), (N,), eps=EPS)

    traced = torch.fx.symbolic_trace(run)
    assert getattr(tilenorm, form.op) in [node.target for node in traced.graph.nodes]
    rows = [tensors[n] for n in ("input", "addend", "residual")]
    assert all(map(torch.equal, traced(*rows), run(*rows)))
