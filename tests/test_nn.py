"""tilenorm.RMSNorm and LayerNorm stand in for torch.nn's, both ways."""

import copy
import inspect

import pytest
import torch
from torch import nn

import tilenorm

from .ops.helpers import EACH_DEVICE, assert_within, random, through_pickle, through_save

PAIRS = {"RMSNorm": (tilenorm.RMSNorm, nn.RMSNorm), "LayerNorm": (tilenorm.LayerNorm, nn.LayerNorm)}
EACH_PAIR = pytest.mark.parametrize("ours, theirs", PAIRS.values(), ids=PAIRS)
EACH = pytest.mark.parametrize("ours", [tilenorm.RMSNorm, tilenorm.LayerNorm])
BEYOND = {"offset": 0.0, "rounding": "late"}

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")


def randomized(module: nn.Module) -> nn.Module:
    """With parameters that are not all ones and zeros."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed))
    return module


@EACH_PAIR
def test_the_signature_is_pytorchs_and_more(ours, theirs):
    mine, other = (inspect.signature(c.__init__).parameters for c in (ours, theirs))
    assert [(n, mine[n].default, mine[n].kind) for n in other] == [
        (n, p.default, p.kind) for n, p in other.items()
    ]
    more = {n: p for n, p in mine.items() if n not in other}
    assert {n: p.default for n, p in more.items()} == BEYOND
    assert all(p.kind is p.KEYWORD_ONLY for p in more.values())


@EACH_PAIR
def test_is_one_of_pytorchs(ours, theirs):
    assert isinstance(ours(8), theirs)


@EACH_PAIR
@pytest.mark.parametrize("shape", [24, (24,), [4, 6], torch.Size([4, 6])], ids=str)
def test_state_dicts_load_both_ways(ours, theirs, shape):
    mine, other = randomized(ours(shape)), theirs(shape)
    other.load_state_dict(mine.state_dict())
    back = ours(shape)
    back.load_state_dict(other.state_dict())
    assert mine.state_dict().keys() == other.state_dict().keys() == back.state_dict().keys()
    for name, parameter in mine.named_parameters():
        assert torch.equal(back.get_parameter(name), parameter)


ARGUMENTS = {
    "plain": {},
    "eps": {"eps": 0.01},
    "no affine": {"elementwise_affine": False},
    "two dimensions": {"normalized_shape": (4, 24)},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
}


@EACH_DEVICE
@EACH_PAIR
@pytest.mark.parametrize("case", ARGUMENTS)
def test_gives_what_pytorchs_gives(device, ours, theirs, case):
    check_equal(device, ours, theirs, ARGUMENTS[case])


@EACH_DEVICE
def test_layer_norm_without_bias(device):
    module = tilenorm.LayerNorm(24, bias=False)
    assert module.bias is None and list(module.state_dict()) == ["weight"]
    check_equal(device, tilenorm.LayerNorm, nn.LayerNorm, {"bias": False})


def check_equal(device, ours, theirs, arguments):
    arguments = {"normalized_shape": 24, "device": device, **arguments}
    dtype = arguments.get("dtype", torch.float32)
    mine, other = randomized(ours(**arguments)), randomized(theirs(**arguments))
    oracle = copy.deepcopy(other).double().cpu()
    shape = (5, 4, 24)
    x, dy = (random(*shape, dtype=dtype, seed=seed) for seed in (5, 6))

    def results(module, x, dy):
        x = x.clone().requires_grad_()
        y = module(x)
        grads = torch.autograd.grad(y, (x, *module.parameters()), dy)
        return dict(zip(("y", "x", "weight", "bias"), (y, *grads), strict=False))

    if "eps" not in arguments and theirs is nn.RMSNorm:
        oracle.eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    exact = results(oracle, x.double(), dy.double())
    peer = results(other, x.to(device), dy.to(device))
    for name, got in results(mine, x.to(device), dy.to(device)).items():
        assert got.dtype == peer[name].dtype and got.device == peer[name].device
        summed = got.shape != shape
        rows = x.numel() // got.numel() if summed else 1
        assert_within(name, got, exact[name], peer[name], rows=rows)


@EACH
@pytest.mark.parametrize("offset", [0.0, 1.0, -0.5])
def test_starts_and_is_reset_as_a_plain_norm(ours, offset):
    module = ours(24, offset=offset)
    for _ in range(2):
        assert torch.equal(module.weight, torch.full((24,), 1.0 - offset))
        assert getattr(module, "bias", None) is None or not module.bias.any()
        randomized(module).reset_parameters()
    x = random(5, 24)
    assert torch.equal(module(x), ours(24)(x))


@EACH
def test_without_affine_there_is_nothing_to_reset(ours):
    module = ours(24, elementwise_affine=False, offset=1.0)
    module.reset_parameters()
    assert module.weight is None and not module.state_dict()


@EACH
def test_offset_and_rounding_reach_the_function(ours):
    module = randomized(ours(24, offset=1.0, rounding="early").bfloat16())
    x = random(5, 24, dtype=torch.bfloat16)
    options = {"eps": module.eps, "offset": 1.0, "rounding": "early"}
    if ours is tilenorm.RMSNorm:
        expected = tilenorm.rms_norm(x, (24,), module.weight, **options)
    else:
        expected = tilenorm.layer_norm(x, (24,), module.weight, module.bias, **options)
    assert torch.equal(module(x), expected)


@EACH_PAIR
def test_repr_tells_what_pytorchs_does_and_more(ours, theirs):
    assert ours(24).extra_repr() == theirs(24).extra_repr()
    text = ours(24, offset=1.0, rounding="early").extra_repr()
    assert text == f"{theirs(24).extra_repr()}, offset=1, rounding='early'"


@EACH
@pytest.mark.parametrize("rounding", ["Early", None, ""])
def test_an_unknown_rounding_raises_at_once(ours, rounding):
    with pytest.raises(ValueError, match=r"rounding: got .*, takes 'late' or 'early'"):
        ours(24, rounding=rounding)


@EACH
@pytest.mark.parametrize("through", [copy.deepcopy, through_pickle, through_save])
def test_copies_are_whole(ours, through):
    module = randomized(ours(24, offset=1.0, rounding="early"))
    again, x = through(module), random(5, 24)
    assert torch.equal(again(x), module(x))
    assert repr(again) == repr(module)
    assert again.weight is not module.weight


@EACH
def test_made_on_meta_and_filled_later(ours):
    module = ours(24, device="meta", offset=1.0)
    assert module(torch.empty(5, 24, device="meta")).is_meta
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    x = random(5, 24)
    assert torch.equal(module(x), ours(24)(x))


@EACH
def test_half(ours):
    module = randomized(ours(24)).half()
    y = module(random(5, 24, dtype=torch.float16))
    assert module.weight.dtype == y.dtype == torch.float16


@EACH
def test_float32_parameters_with_a_16_bit_input(ours):
    x = random(5, 24, dtype=torch.bfloat16).requires_grad_()
    module = randomized(ours(24))
    module(x).float().sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


@EACH_PAIR
def test_input_by_its_keyword(ours, theirs):
    """The name is not the same in both of PyTorch's."""
    names = [list(inspect.signature(c.forward).parameters) for c in (ours, theirs)]
    assert names[0] == names[1]


def test_a_model_trains_as_with_pytorchs():
    x = random(64, 8)
    target = x[:, :1] * x[:, 1:2]
    losses = {tilenorm: [], nn: []}
    for source, found in losses.items():
        torch.manual_seed(0)
        norms = source.RMSNorm(24), source.LayerNorm(24)
        model = nn.Sequential(nn.Linear(8, 24), norms[0], nn.Linear(24, 24), norms[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for _ in range(5):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    assert losses[tilenorm] == pytest.approx(losses[nn], rel=1e-5)
    assert losses[nn][-1] < losses[nn][0]
