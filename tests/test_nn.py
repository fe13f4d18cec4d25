"""tilenorm.RMSNorm and tilenorm.LayerNorm: the same interface and results as torch.nn's modules."""

import copy
import inspect

import pytest
import torch
from torch import nn

import tilenorm
from tests.support.calls import random, through_pickle, through_save

PAIRS = {"RMSNorm": (tilenorm.RMSNorm, nn.RMSNorm), "LayerNorm": (tilenorm.LayerNorm, nn.LayerNorm)}
EACH_PAIR = pytest.mark.parametrize("ours, theirs", PAIRS.values(), ids=PAIRS)
EACH = pytest.mark.parametrize("ours", [tilenorm.RMSNorm, tilenorm.LayerNorm])
EXTRA_ARGUMENTS = {"offset": 0.0, "rounding": "late", "out_dtype": None}

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")


def randomized(module: nn.Module) -> nn.Module:
    """Give the module random parameters, so that they are not all ones and zeros."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed))
    return module


@EACH_PAIR
def test_signature_extends_pytorchs(ours, theirs):
    our_parameters, their_parameters = (
        inspect.signature(c.__init__).parameters for c in (ours, theirs)
    )
    assert [(n, our_parameters[n].default, our_parameters[n].kind) for n in their_parameters] == [
        (n, p.default, p.kind) for n, p in their_parameters.items()
    ]
    extra = {n: p for n, p in our_parameters.items() if n not in their_parameters}
    assert {n: p.default for n, p in extra.items()} == EXTRA_ARGUMENTS
    assert all(p.kind is p.KEYWORD_ONLY for p in extra.values())
    # torch.nn.RMSNorm names the argument x, torch.nn.LayerNorm names it input.
    names = [list(inspect.signature(c.forward).parameters) for c in (ours, theirs)]
    assert names[0] == names[1] and issubclass(ours, theirs)


ARGUMENTS = (
    {},
    {"eps": 0.01},
    {"elementwise_affine": False},
    {"normalized_shape": [4, 24]},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float64},
    {"offset": 1.0, "rounding": "early", "dtype": torch.bfloat16},
    {"out_dtype": torch.float32, "dtype": torch.bfloat16},
    {"out_dtype": torch.float16},
)
FUNCTIONS = {nn.RMSNorm: tilenorm.rms_norm, nn.LayerNorm: tilenorm.layer_norm}
RESULTS = [(*pair, arguments) for pair in PAIRS.values() for arguments in ARGUMENTS]
RESULTS.append((*PAIRS["LayerNorm"], {"bias": False}))


@pytest.mark.parametrize("ours, theirs, arguments", RESULTS)
def test_a_module_calls_its_function(ours, theirs, arguments):
    """With the parameters and the eps of PyTorch's module of the same arguments."""
    arguments = {"normalized_shape": 24} | arguments
    options = {n: arguments.pop(n) for n in EXTRA_ARGUMENTS if n in arguments}
    module, other = ours(**arguments, **options), randomized(theirs(**arguments))
    assert module.state_dict().keys() == other.state_dict().keys()
    module.load_state_dict(other.state_dict())
    shape, function = other.normalized_shape, FUNCTIONS[theirs]
    x = random(5, *shape, dtype=arguments.get("dtype", torch.float32))
    given = dict(other.named_parameters()) | options
    assert torch.equal(module(x), function(x, shape, **given, eps=other.eps))


@EACH
@pytest.mark.parametrize("offset", [0.0, 1.0, -0.5])
def test_initial_and_reset_module_is_a_plain_norm(ours, offset):
    module = ours(24, offset=offset)
    for _ in range(2):
        assert torch.equal(module.weight, torch.full((24,), 1.0 - offset))
        assert getattr(module, "bias", None) is None or not module.bias.any()
        randomized(module).reset_parameters()
    x = random(5, 24)
    assert torch.equal(module(x), ours(24)(x))


@EACH_PAIR
def test_repr_extends_pytorchs(ours, theirs):
    assert ours(24).extra_repr() == theirs(24).extra_repr()
    text = ours(24, offset=1.0, rounding="early", out_dtype=torch.float16).extra_repr()
    plain = theirs(24).extra_repr()
    assert text == f"{plain}, offset=1, rounding='early', out_dtype=torch.float16"


@EACH
@pytest.mark.parametrize("make_copy", [copy.deepcopy, through_pickle, through_save])
def test_copies_compute_the_same(ours, make_copy):
    module = randomized(ours(24, offset=1.0, rounding="early", out_dtype=torch.float16))
    other, x = make_copy(module), random(5, 24)
    assert torch.equal(other(x), module(x))
    assert repr(other) == repr(module)
    assert other.weight is not module.weight


def patched(n):
    norm = nn.LayerNorm(n)
    tilenorm.patch(norm)
    return norm


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [tilenorm.RMSNorm, tilenorm.LayerNorm, patched])
def test_torch_jit_script_is_refused(make):
    model = nn.Sequential(nn.Linear(16, 16), make(16))
    with pytest.raises(NotImplementedError, match=r"use torch\.export or"):
        torch.jit.script(model)


MODULATED = {
    "rms": (tilenorm.ModulatedRMSNorm, nn.RMSNorm, tilenorm.modulated_rms_norm),
    "layer": (tilenorm.ModulatedLayerNorm, nn.LayerNorm, tilenorm.modulated_layer_norm),
}
EACH_MODULATED = pytest.mark.parametrize(
    "ours, theirs, function", MODULATED.values(), ids=MODULATED
)


@EACH_MODULATED
@pytest.mark.parametrize("affine", [False, True])
def test_modulated_modules_call_their_functions(ours, theirs, function, affine):
    module = randomized(ours((4, 6), 0.01, affine))
    names = ("input", "residual", "scale", "shift", "gate")
    shapes = [(2, 3, 4, 6)] * 2 + [(2, 4, 6)] * 3
    given = {n: random(*s, seed=i) for i, (n, s) in enumerate(zip(names, shapes, strict=True))}
    x, scale = given.pop("input"), given.pop("scale")
    options = dict(module.named_parameters()) | {"eps": 0.01}
    y, total = module(x, scale, **given)
    expected = function(x, (4, 6), scale, **given, **options)
    assert torch.equal(y, expected[0]) and torch.equal(total, expected[1])
    plain = theirs((4, 6), 0.01, affine)
    plain.load_state_dict(module.state_dict())
    alone = module(x, scale)
    torch.testing.assert_close(alone, plain(x) * (1 + scale.unsqueeze(1)))
    for again in (copy.deepcopy(module), through_pickle(module)):
        assert torch.equal(again(x, scale), alone)


@EACH_MODULATED
def test_modulated_modules_have_no_parameters_by_default(ours, theirs, function):
    module = ours(8)
    assert not list(module.parameters()) and module.eps == 1e-6 and issubclass(ours, theirs)
    with pytest.raises(NotImplementedError, match=f"{ours.__name__}: torch.jit.script"):
        torch.jit.script(module)
    with pytest.raises(TypeError, match=f"{ours.__name__}: argument 'dtype'"):
        ours(8, dtype=8)
