"""Calls that were checked before are found again where nothing that counts differs, and only there;
from the third call with a shape on, a call repeats the launches of an earlier one.
"""

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from random import Random

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import tilenorm
from tests.support.calls import ADD, CALLS, FEW, LAYER, RMS, call, random, same, step, tensors_of
from tests.support.passes import Seen, SeenFunctions, Subclass
from tests.support.pretended import WARM
from tests.support.results import seeds
from tests.support.served import entered, is_served
from tests.support.wrong_calls import right_of
from tilenorm.ops import call as calls
from tilenorm.ops.call import MOST_GUARDS, remembered
from tilenorm.ops.passes import cutile, native
from tilenorm.ops.pytorch import torch_private
from tilenorm.table import MODULATED_NORMS

N = 64


@pytest.fixture(autouse=True)
def checked(as_on_a_gpu, monkeypatch) -> list[str]:
    """A list that gets the names of the functions whose calls are checked."""
    seen, original = [], calls.checked
    monkeypatch.setattr(calls, "checked", lambda op, *a: seen.append(op.name) or original(op, *a))
    return seen


@pytest.fixture
def made(as_on_a_gpu, monkeypatch):
    """Of each call: whether it was made by the driver ("repeated"), or prepared."""
    done, prepare = [], cutile.prepare

    def preparing(*given):
        done.append("prepared")
        repeat = prepare(*given)

        def repeated(*called):
            done.append("repeated")
            return repeat(*called)

        return repeat and repeated

    monkeypatch.setattr(cutile, "prepare", preparing)
    return done


def taken(done: list) -> list:
    found = list(done)
    done.clear()
    return found


@pytest.mark.parametrize("name", FEW)
def test_the_same_bits_without_checks_and_without_cutile(device, name, checked, made):
    form = CALLS[name]
    tensors = tensors_of(form, 2, 3, N, dtype=torch.bfloat16, device=device)
    expected = step(form, tensors), call(form, tensors)
    assert same(step(form, tensors), expected[0])
    assert taken(made) == ["prepared"] * 2  # forward and backward
    for seed in range(2):
        other = {n: t if seed == 0 else t.clone() for n, t in tensors.items()}
        assert same(step(form, other), expected[0])
        assert taken(made) == ["repeated"] * 2
    assert all(map(torch.equal, call(form, tensors), expected[1]))
    assert len(checked) == 2


def test_any_number_of_rows(device, form, checked):
    call(form, tensors_of(form, 5, N, device=device))
    for rows in (1, 7, 0, 5):
        tensors = tensors_of(form, rows, N, device=device)
        assert call(form, tensors)[0].shape == (rows, N)
    assert len(checked) == 1


def one_element_in(x):
    """A copy that does not start on 16 bytes."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


def under_autocast(x, w):
    with torch.autocast(x.device.type, torch.bfloat16):
        return tilenorm.layer_norm(x.bfloat16(), (N,), w)


def masked(x, w, scale):
    how = {"dropout_mask": x > 0, "dropout_scale": scale}
    return tilenorm.add_rms_norm(x, 2 * x, (N,), w, 1e-6, **how)[0]


def rms(x, w, eps=1e-6, shape=(N,), **options):
    return tilenorm.rms_norm(x, shape, w, eps, **options)


def within(mode, x, w):
    with mode:
        y = rms(x, w)
    assert mode.calls
    return y


def tangent(x, w):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(rms(dual, w)).tangent


def compiled(x, w):
    torch._dynamo.reset()
    return torch.compile(rms, fullgraph=True, backend="aot_eager")(x, w)


def traced(x, w):
    return torch.jit.trace(rms, (x, w), check_trace=False)(x, w)


OTHER = {
    "no eps": lambda x, w: rms(x, w, None),
    "an offset": lambda x, w: rms(x, w, offset=1.0),
    "rounded early": lambda x, w: rms(x.bfloat16(), w.bfloat16(), rounding="early"),
    "the reference": lambda x, w: rms(x, w, backend="reference"),
    "layer_norm": lambda x, w: tilenorm.layer_norm(x, (N,), w, None, 1e-6),
    "a list": lambda x, w: rms(x, w, shape=[N]),
    "both dimensions": lambda x, w: rms(x, None, shape=x.shape),
    "a row of two dimensions": lambda x, w: rms(x[:1], w[None], shape=(1, N)),
    "heads": lambda x, w: rms(x.view(3, 2, N), torch.stack([w, 2 * w])),
    "a bias for a weight": lambda x, w: rms(x, None, bias=w),
    "no weight": lambda x, w: rms(x, None),
    "a parameter": lambda x, w: rms(x, nn.Parameter(w)).detach(),
    "another dtype": lambda x, w: rms(x.bfloat16(), w),
    "one dimension": lambda x, w: rms(x[0], w),
    "one row of an odd stride": lambda x, w: rms(x[:1].as_strided((1, N), (7, 1)), w),
    "under autocast": under_autocast,
    "a second residual": lambda x, w: tilenorm.add_rms_norm(x, (x, 2 * x), (N,), w, 1e-6)[0],
    "masked": lambda x, w: masked(x, w, 1.0),
    "masked and larger": lambda x, w: masked(x, w, 2.0),
    "other rows": lambda x, w: rms(x[:2], w),
    "strided": lambda x, w: rms(torch.stack([x, x], -1)[..., 0], w),
    "not on 16 bytes": lambda x, w: rms(one_element_in(x), w),
    "an int for eps": lambda x, w: rms(x, w, 1),
    "a subclass": lambda x, w: rms(x.as_subclass(Subclass), w).as_subclass(torch.Tensor),
    "a dispatch mode": lambda x, w: within(Seen(), x, w),
    "a function mode": lambda x, w: within(SeenFunctions(), x, w),
    "vmap": lambda x, w: torch.func.vmap(lambda x: rms(x, w))(x[None]),
    "a constant of a transform": lambda x, w: torch.func.vmap(lambda i: i * rms(x, w))(x),
    "a gradient of torch.func": lambda x, w: torch.func.grad(lambda x: rms(x, w).sum())(x),
    "a dual level": tangent,
    "compiled": compiled,
    "traced": traced,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("served", ["in_python", "extension"])
@pytest.mark.parametrize("name", OTHER)
def test_another_call_gives_the_bits_it_would_give_alone(device, name, served, request):
    """Between calls that Python repeats, or that the extension in C++ serves."""
    request.getfixturevalue(served)
    other, x, w = OTHER[name], random(6, N, device=device), random(N, device=device, seed=1)
    expected = other(x.clone(), w.clone())
    remembered.cache_clear()
    native.state().forget()
    first = [rms(x, w) for _ in range(WARM)][-1]
    assert device == "cuda" or is_served(lambda: rms(x, w)) == (served == "extension")
    for _ in range(2):
        got = other(x.clone(), w.clone())
        assert got.dtype == expected.dtype and torch.equal(got, expected)
        assert torch.equal(rms(x, w), first)


def test_another_current_device_is_not_served(device, checked, monkeypatch):
    tensors = tensors_of(RMS, 5, N, device=device)
    call(RMS, tensors)
    monkeypatch.setattr(torch_private, "current_device", lambda: 1)
    call(RMS, tensors)
    assert len(checked) == 2


def test_a_bool_is_no_size(device):
    x = random(5, 1, device=device)
    rms(x, None, shape=(1,))
    with pytest.raises(TypeError, match="'normalized_shape' takes a tuple of ints"):
        rms(x, None, shape=(True,))


@pytest.mark.parametrize("shape", [(), (1,)], ids=["taken", "refused"])
def test_a_tensor_in_place_of_a_number_is_not_kept(device, shape):
    eps = torch.full(shape, 1e-5)
    with pytest.raises(TypeError) if shape else nullcontext():
        tilenorm.layer_norm(random(5, N, device=device), (N,), None, None, eps)
    alive = weakref.ref(eps)
    del eps
    gc.collect()
    assert alive() is None


def test_the_guards_of_a_call_are_bounded(device):
    for dims in range(1, MOST_GUARDS + 4):
        rms(random(*[1] * dims, N, device=device), None)
    # The bits: which tensors there are. The options stand behind the tuple.
    how = (1e-6, None, 0b1100, tuple, 0.0, "late", None, N)
    assert len(remembered("rms_norm", *how)) == MOST_GUARDS


def test_a_tensor_given_twice(device, checked):
    """Calls with one tensor for input and residual are told from those with two."""
    x, r = random(5, N, device=device), random(5, N, device=device, seed=1)
    for residual in (x, r, x, r):
        expected = tilenorm.rms_norm(x + residual, (N,), None, 1e-6)
        y, total = tilenorm.add_rms_norm(x, residual, (N,), None, 1e-6)
        assert torch.equal(y, expected) and torch.equal(total, x + residual)
    assert checked.count("add_rms_norm") == 2


@pytest.mark.parametrize("name", ["input", "weight", "dy"])
def test_a_tensor_that_lies_otherwise(name, device, made):
    """Of these, one that is not contiguous is copied from the third call on, and the launches are
    repeated. One that does not start on 16 bytes is launched by cuTile.
    """
    tensors, dy = tensors_of(RMS, 3, N, device=device), random(3, N, device=device)
    expected = [step(RMS, tensors, [dy]) for _ in range(3)][-1]
    assert taken(made)[-2:] == ["repeated"] * 2
    every = tensors | {"dy": dy}
    for moved, repeats in (
        (torch.stack([every[name]] * 2, -1)[..., 0], True),
        (one_element_in(every[name]), False),
    ):
        *_, dy = given = (every | {name: moved}).values()
        for _ in range(WARM):
            made.clear()
            assert same(step(RMS, dict(zip(tensors, given, strict=False)), [dy]), expected)
        assert len(taken(made)) == (2 if repeats else name == "dy")  # else the forward pass alone


def apart(t, space):
    """A copy whose rows are `space` elements apart in memory."""
    wide = torch.cat([t, t.new_ones(*t.shape[:-1], space)], -1)
    return wide[..., : t.shape[-1]]


@pytest.mark.parametrize("served", ["in_python", "extension"])
@pytest.mark.parametrize("name", [*FEW, "heads"])
def test_rows_that_are_apart_are_repeated(device, name, served, request):
    """A call knows what repeats it by the strides of its tensors, if they are not contiguous."""
    request.getfixturevalue(served)
    made, form = request.getfixturevalue("made"), CALLS.get(name, RMS)
    shape = (3, 2, N) if name == "heads" else (6, N)
    tensors = tensors_of(form, *shape, dtype=torch.bfloat16, device=device)
    if name == "heads":
        tensors |= {n: torch.stack([tensors[n], 2 * tensors[n]]) for n in ("weight", "bias")}
    rows = [n for n, t in tensors.items() if t.shape == tensors["input"].shape]
    dys = [random(*shape, dtype=torch.bfloat16, device=device, seed=9)] * (1 + ("add_" in form.op))
    lying = [(tensors, dys)]
    for space in (8, 16):
        moved = {n: apart(tensors[n], space) for n in rows}
        lying.append((tensors | moved, [apart(dy, space) for dy in dys]))
    expected = step(form, tensors, dys), call(form, tensors)
    for given, incoming in lying * WARM:
        assert same(step(form, given, incoming), expected[0])
        assert all(map(torch.equal, call(form, given), expected[1]))
    taken(made)
    for given, incoming in lying * 2:
        assert same(step(form, given, incoming), expected[0])
        assert all(map(torch.equal, call(form, given), expected[1]))
        assert taken(made) == ["repeated"] * 3
    if device == "cpu":  # the extension, or the same functions in Python, whatever lies apart
        contiguous, *runs = [entered(partial(call, form, given)) for given, _ in lying]
        assert runs == [contiguous] * 2
        assert (contiguous[-1] == "call") == (served == "extension")


LAYOUTS = {
    "apart": lambda t: apart(t, 8),
    "further apart": lambda t: apart(t, 24),
    "not all on 16 bytes": lambda t: apart(t, 3),
    "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "the last dimension first": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
}


@pytest.mark.parametrize("served", ["in_python", "extension"])
@seeds(2, 4)
def test_drawn_layouts_have_the_same_bits(device, seed, served, request):
    """Calls of one shape, of whose tensors some lie otherwise in memory."""
    request.getfixturevalue(served)
    rng = Random(seed)
    form, width = CALLS[rng.choice(list(CALLS))], 8 * rng.randint(1, 12)
    tensors = tensors_of(form, 2, 3, width, dtype=torch.bfloat16, device=device)
    dys = [random(2, 3, width, dtype=torch.bfloat16, device=device)] * (1 + ("add_" in form.op))
    expected = step(form, tensors, dys), call(form, tensors)
    drawn = []
    for _ in range(6):
        given = {n: rng.choice([*LAYOUTS.values(), torch.clone])(t) for n, t in tensors.items()}
        drawn.append((given, [rng.choice([*LAYOUTS.values(), torch.clone])(dy) for dy in dys]))
    for given, incoming in rng.choices(drawn, k=30):
        assert same(step(form, given, incoming), expected[0])
        assert all(map(torch.equal, call(form, given), expected[1]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_extension_serves_tensors_that_lie_otherwise(device, layout, extension):
    """In both directions, from a copy where the kernels do not read a tensor in place."""
    tensors = tensors_of(ADD, 5, N, device=device)
    tensors = {n: LAYOUTS[layout](t.detach()).requires_grad_() for n, t in tensors.items()}
    dys = [LAYOUTS[layout](random(5, N, device=device, seed=seed)) for seed in range(2)]

    def forward():
        return call(ADD, tensors)

    def backward(outputs):
        return torch.autograd.grad(outputs, [*tensors.values()], dys)

    for _ in range(2 * WARM):  # the copies are calls of their own
        expected = backward(forward())
    outputs, found = forward(), []
    assert is_served(forward)
    assert not entered(lambda: found.extend(backward(outputs)))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("op", MODULATED_NORMS)
def test_what_lies_by_group_is_read_wherever_it_lies(op, device):
    """In place from a chunk, also in repeated calls, and copied from every second element."""
    right = right_of(op)
    given = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in right.items()}
    expected = getattr(tilenorm, op)(**given)
    by_group = {name: given[name] for name in ("scale", "shift", "gate")}
    chunks = {name: torch.cat([t, t], -1)[..., :8] for name, t in by_group.items()}
    uneven = {name: t.repeat_interleave(2, -1)[..., ::2] for name, t in by_group.items()}
    for changes in (chunks, chunks, chunks, uneven, chunks):
        assert all(map(torch.equal, getattr(tilenorm, op)(**given | changes), expected))


def test_a_weight_of_another_shape_gets_its_gradient_in_that_shape(device, made):
    tensors = tensors_of(RMS, 3, 1, N, device=device)
    for shape in ((N,), (1, N)) * 3:
        given = tensors | {n: tensors[n].view(shape) for n in ("weight", "bias")}
        x, w, b = (given[n].detach().requires_grad_() for n in ("input", "weight", "bias"))
        tilenorm.rms_norm(x, shape, w, bias=b).sum().backward()
        y = tilenorm.rms_norm(x, shape, w, bias=b)
        w.grad = b.grad = None
        y.backward(torch.ones_like(y))
        assert w.grad.shape == b.grad.shape == shape


def test_another_shape_or_eps_is_another_call(device, made):
    x = random(4, N, device=device)
    for eps in (1e-6, 1e-5, 1e-6):
        for rows in (4, 3):
            tilenorm.rms_norm(x[:rows], (N,), eps=eps)
    assert taken(made) == ["prepared"] * 2
    expected = x[:3] * (x[:3].square().mean(1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(tilenorm.rms_norm(x[:3], (N,), eps=1e-6), expected)
    assert taken(made) == ["repeated"]


def test_while_a_graph_is_captured_nothing_is_kept(device, monkeypatch):
    asked = []
    monkeypatch.setattr(cutile, "prepare", lambda *given: asked.append(given))
    tensors = tensors_of(LAYER, 3, N, device=device)
    first = step(LAYER, tensors)
    for _ in range(3):
        assert same(step(LAYER, tensors), first)
    assert len(asked) == 6
