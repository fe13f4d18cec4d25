"""The torch.library ops: their contracts, fakes, decompositions, and what Inductor's generated code
calls in their place.

Calls are drawn. Graphs and derivatives of chained, modulated and rotated norms follow from the
table of ops.
"""

from dataclasses import replace
from random import Random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.testing._internal.two_tensor import TwoTensor

from tests.support import calls as helpers
from tests.support.calls import (
    DTYPES,
    RMS,
    Form,
    by_inductor,
    compare,
    op_call,
    random,
    tensors_of_op,
)
from tests.support.drawn import CHAINS, FORMS, draw, laid_out
from tests.support.passes import Seen, changed, check_decomposition, detached, named
from tests.support.pretended import by
from tilenorm.ops.torch_ops import library
from tilenorm.table import MODULATED_NORMS, NORMS, OPS, ROTATED_NORMS

B, F32 = torch.bfloat16, torch.float32
OTHERS = {name: Form(name) for name in MODULATED_NORMS}
OTHERS |= {name: Form(name, {"offset": 0.5}) for name in (*CHAINS, *ROTATED_NORMS)}
EACH_OP = pytest.mark.parametrize("name", OTHERS)
ALL_UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor")
ALL_UTILITIES += ("test_aot_dispatch_dynamic",)


def needing(op, arguments: tuple) -> tuple:
    """The arguments of an op, those of a forward op that have a gradient requiring it."""
    ports = OPS[op._opname].takes if op._opname in OPS else ()
    for port, t in zip(ports, arguments, strict=False):
        if t is not None:
            t.requires_grad_(port.grad)
    return arguments


def check_alone(op, arguments: tuple, served: str, device: str = "cpu") -> tuple:
    """The decomposition and what Inductor's code calls give the results of the op: these. It takes
    mean and rstd in one dimension, too.
    """
    given = named(op, arguments)
    flat = {n: given[n].reshape(-1) for n in ("mean", "rstd") if given.get(n) is not None}
    with by(served, device):
        found, bound = op(*arguments), by_inductor(op._opname)(*arguments)
        assert not flat or all(map(torch.equal, op(*changed(op, arguments, **flat)), found))
    if device == "cpu":  # served by the reference, which has the same formula and lays out alike
        check_decomposition(op, arguments)
    for one, other in zip(bound, found, strict=True):
        assert other.numel() == 0 if one is None else torch.equal(one, other)
    return found


@pytest.mark.parametrize("served", ["reference", "kernels", "sm_80"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_drawn_calls(device, served, form):
    """Also of no rows, and of rows apart; mean and rstd have the leading sizes of the rows. What
    only a gradient needs, and gradients by their mask, are empty where none asks.
    """
    rng = Random(f"{form} {served}")
    for number, dtype in enumerate(rng.sample(DTYPES[1:], 2)):
        drawn = draw(rng, form, dtype, device)
        tensors = {n: rng.choice((t, laid_out(rng, t))) for n, t in drawn.tensors.items()}
        with Seen() as seen:
            helpers.step(form, tensors, drawn.incoming, drawn.asked, **drawn.options)
        with by(served, device):
            eager = helpers.call(form, tensors, **drawn.options)
        for op, arguments in seen.calls:
            found = check_alone(op, arguments, served, device)
            if op._opname == form.op:
                assert all(map(torch.equal, eager, found))
            if op._opname == form.op and form.op in NORMS:
                x, dims = tensors["input"], drawn.options["dims"]
                shapes = [t.shape for t in found[len(drawn.incoming) :]]
                lead = x.shape[:-dims] if x.shape[-dims:].numel() else (0,)
                assert shapes == [lead] * (2 if "layer" in form.op else 1)
            if served != "reference":
                continue
            # Tracing with symbolic sizes takes longest, and is the same for every dtype.
            utilities = ALL_UTILITIES if number == 0 else ALL_UTILITIES[:-1]
            opcheck(op, needing(op, arguments), test_utils=utilities)
            arguments = tuple(map(detached, arguments))
            if op._opname == form.op:
                arguments = changed(op, arguments, save=False)
                assert not any(t.numel() for t in op(*arguments)[len(eager) :])
                opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
            elif "output_mask" in (given := named(op, arguments)):
                nothing = [False] * len(given["output_mask"])
                assert not any(t.numel() for t in op(*changed(op, arguments, output_mask=nothing)))


def made(name: str, dtype: torch.dtype = F32, **sizes) -> dict[str, torch.Tensor]:
    """Every tensor that an op takes; those that have a gradient require it."""
    given = tensors_of_op(name, dtype, **sizes)
    return {p.name: given[p.name].requires_grad_(p.grad) for p in OPS[name].takes}


def call(name: str, given: dict, **how) -> tuple[torch.Tensor, ...]:
    return helpers.call(OTHERS[name], given, **how)


def step(name: str, function=helpers.call) -> dict[str, torch.Tensor]:
    asked = [port.name for port in OPS[name].takes if port.grad]
    return helpers.step(OTHERS[name], tensors_of_op(name), asked=asked, function=function)


@EACH_OP
def test_graphs(name, dynamo):
    given = {n: detached(t) for n, t in made(name).items()}
    traced = make_fx(lambda given: call(name, given))(given)
    op = getattr(torch.ops.tilenorm, name).default
    assert op in [node.target for node in traced.graph.nodes]
    compare(traced(given), call(name, given), 0.0)
    compiled = torch.compile(helpers.call, backend="aot_eager", fullgraph=True)
    compare(step(name, compiled).values(), step(name).values(), 1e-6)


@EACH_OP
def test_second_derivatives_and_transforms(name):
    given = made(name, torch.float64, lead=(2, 2), n=4)
    ports = [port for port in OPS[name].takes if port.grad]
    names, inputs = [port.name for port in ports], [t for t in given.values() if t.requires_grad]

    def function(*tensors):
        return call(name, given | dict(zip(names, tensors, strict=True)), eps=1e-3)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)
    dims = tuple(None if port.parameter else 0 for port in ports)
    compare(torch.func.vmap(function, dims)(*inputs), function(*inputs), 1e-12)
    tangents = tuple(torch.ones_like(t) for t in inputs)
    _, found = torch.func.jvp(function, tuple(inputs), tangents)
    assert all(t.isfinite().all() for t in found)


@pytest.mark.parametrize("x", [random(3, 40), random(0, 40), torch.empty(3, 40, device="meta")])
def test_a_row_length_that_no_dimensions_hold_is_refused(x):
    with pytest.raises(RuntimeError, match=r"argument 'hidden' takes .* got 20 for an input of"):
        op_call("rms_norm", {"input": x}, 20)


@pytest.mark.parametrize("grad", [True, False])
def test_subclasses_see_the_op(device, grad):
    tensors = helpers.tensors_of(RMS, 3, 40, device=device)
    x, *others = helpers.op_arguments("rms_norm", tensors, 40)
    with torch.set_grad_enabled(grad):
        assert torch.ops.tilenorm.rms_norm(x.requires_grad_(), *others)[0].requires_grad is grad
        inner = TwoTensor(x.detach(), x.detach())
        assert type(torch.ops.tilenorm.rms_norm(inner, *others)[0]) is TwoTensor


def test_a_backward_pass_without_rstd_says_so():
    x = random(3, 8).requires_grad_()
    y = op_call("rms_norm", {"input": x}, 8, save=False)["output"]
    with pytest.raises(RuntimeError, match="save was False, its backward needs it; pass True"):
        y.sum().backward()


@pytest.mark.parametrize("name", OPS)
def test_tracing_adds_nothing_to_a_row_of_the_table(name):
    """torch.compile guards on what a row holds, and refuses a frame that adds to it (2.11)."""
    row = replace(OPS[name])
    held = set(vars(row))
    tensors = tuple(torch.zeros(2, 8) for _ in row.takes)
    library.autocast_arguments(row, tensors, (8, *[None] * len(row.options)))
    assert len(row.arguments) >= len(row.roles) == len(tensors)
    assert set(vars(row)) == held
