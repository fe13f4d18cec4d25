"""Which modules tilenorm.patch recognises by their results, and its reasons for the others."""

import copy
import cProfile
import gc
import re
import sys
from contextlib import nullcontext
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

import tilenorm
from tilenorm.integrations.patch.twin import Refused, run, twin_of

from ..ops.helpers import EACH_DEVICE, random
from ..tolerance import FLOAT32_UNITS
from . import drawn_norms, norms
from .norms import N

RMS = "rms_norm offset=0.0 rounding=late eps=1e-06"
LAYER = "layer_norm offset=0.0 rounding=late eps=1e-05"
EARLY = RMS.replace("late", "early") + " output_dtype=promote_types(input, weight)"
GATED = f"gated_{RMS} norm_before_gate="
ONE_DTYPE = RMS.replace("late", "early") + ", or its own forward for mixed dtypes"
GROUPS = "gated_" + EARLY.replace(
    " output", " groups=3 norm_before_gate=False activation=silu output"
)
RECOGNISED = {
    "LayerNorm": (lambda: nn.LayerNorm(N), LAYER),
    "LayerNorm of three": (lambda: nn.LayerNorm(3), LAYER),
    "LayerNorm without bias": (lambda: nn.LayerNorm(N, bias=False), LAYER),
    "LayerNorm without weight": (lambda: nn.LayerNorm(N, elementwise_affine=False), LAYER),
    "LayerNorm of two dimensions": (lambda: nn.LayerNorm((4, N)), LAYER),
    "LayerNorm in float64": (lambda: nn.LayerNorm(N, dtype=torch.float64), LAYER),
    "RMSNorm": (lambda: nn.RMSNorm(N), RMS.replace("1e-06", "None")),
    "RMSNorm with eps": (lambda: nn.RMSNorm(N, eps=1e-6), RMS),
    "by hand": (lambda: norms.Custom(), RMS),
    "in bfloat16": (lambda: norms.Custom().bfloat16(), RMS),
    "without a telling name": (lambda: norms.Scale(), RMS.replace("0.0", "1.0")),
    "cast around": (lambda: norms.Float32LayerNorm(N), LAYER),
    "a subclass": (lambda: type("Same", (nn.LayerNorm,), {})(N), LAYER),
    "gate first": (lambda: norms.GatedNorm(), GATED + "False activation=silu"),
    "sigmoid gate of a LayerNorm": (
        lambda: norms.SigmoidGatedLayerNorm(N),
        f"gated_{LAYER} norm_before_gate=True activation=sigmoid",
    ),
    "Cohere by heads": (lambda: CohereLayerNorm((4, N)), LAYER),
    "Llama 4 without weight": (lambda: Llama4TextL2Norm(), RMS),
    "Llama": (lambda: LlamaRMSNorm(N), EARLY),
    "Gemma 2": (lambda: Gemma2RMSNorm(N), RMS.replace("0.0", "1.0")),
    "OLMo 2": (lambda: Olmo2RMSNorm(N), RMS),
    "OLMo": (lambda: OlmoLayerNorm(N), LAYER),
    "Qwen3-Next gated": (
        lambda: Qwen3NextRMSNormGated(N),
        GATED.replace("late", "early") + "True activation=silu",
    ),
    "T5": (lambda: T5LayerNorm(N), ONE_DTYPE),
    "the weight's dtype": (lambda: norms.WeightDtypeNorm(), ONE_DTYPE),
    "a gate that is needed": (
        lambda: norms.KimiNorm(),
        GATED.replace("late", "early") + "True activation=silu",
    ),
    "Mamba 2 in groups": (lambda: MambaRMSNormGated(N, 8), GROUPS),
    "Zamba 2 in groups": (lambda: Zamba2RMSNormGated(N, 8), GROUPS),
    "(1, N)": (lambda: norms.BroadcastNorm(1, N), RMS),
    "(1, 1, N)": (lambda: norms.BroadcastNorm(1, 1, N), RMS),
    "(4, N)": (lambda: norms.BroadcastNorm(4, N), RMS),
    "three dimensions alone": (lambda: norms.OfDims(3), RMS),
}
EACH = pytest.mark.parametrize("name", RECOGNISED)


@EACH
def test_is_recognised(name):
    make, how = RECOGNISED[name]
    report = tilenorm.patch(make())
    assert [entry.how for entry in report.patched] == [how] and not report.left


DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@EACH_DEVICE
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@EACH
@pytest.mark.filterwarnings("ignore:Mismatch dtype", "ignore::tilenorm.ReferenceWarning")
def test_patched_module_keeps_values_and_dtype(name, autocast, device):
    make, how = RECOGNISED[name]
    module = make()
    with torch.no_grad():
        for seed, tensor in enumerate(module.parameters()):
            tensor.copy_(random(*tensor.shape, seed=seed))
    patched = copy.deepcopy(module)
    tilenorm.patch(patched)
    dims = getattr(module, "dims", (3,))[0]
    shape = (5, 4, 4, next((p.shape[-1] for p in module.parameters()), N))[-dims:]
    for dtype, parameter in product(DTYPES, DTYPES):
        module, patched = module.to(device, parameter), patched.to(device, parameter)
        tensors = [random(*shape, dtype=dtype, device=device, seed=seed) for seed in (5, 6)]
        tensors = tensors if "gated" in how else tensors[:1]
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            try:
                expected = module(*tensors).detach()
            except RuntimeError:  # PyTorch's norms do not accept every pair of dtypes
                assert dtype != parameter or "cast" in name
                continue
            got = patched(*tensors)
        assert got.dtype == expected.dtype
        close = FLOAT32_UNITS * torch.finfo(dtype).eps
        torch.testing.assert_close(got, expected, rtol=close, atol=close * expected.abs().max())


NO_NORM = "its outputs match no norm of tilenorm"
ROUNDS_DIFFERENTLY = "rounds or casts 16 bits differently"
EFFECT = "its forward changes the module or its input"
# The value of one part of a drawn class, and the reason why the class is left.
PARTS = {
    ("norm", "mean of the batch"): NO_NORM,
    ("shape", ()): r"its parameters are g \[\], not a number for each column",
    ("shape", (3, 1)): r"its parameters are g \[3, 1\], not a number for each column",
    ("shape", (0,)): r"its parameters are empty \(g \[0\]\)",
    ("offset", 1.0): ROUNDS_DIFFERENTLY,  # in 16 bits, 1 + g is rounded. Gemma casts g first.
    ("cast", "none"): ROUNDS_DIFFERENTLY,
    ("output", "none"): ROUNDS_DIFFERENTLY,
    ("eps", "of the input"): NO_NORM,
    ("eps", "of the length"): NO_NORM,
    ("eps", "outside"): NO_NORM,
    ("early", "matrix"): NO_NORM,
    ("early", "no gradients"): "but not for a run without gradients",
    ("early", "strided"): "but not for strided inputs",
    ("early", "float16"): ROUNDS_DIFFERENTLY,
    ("early", "odd"): "its forward branches on sizes: Eq",
    ("early", "too long"): "its forward branches on sizes",
    ("early", "large"): "its forward branches on values",
    ("early", "clamped"): "its forward selects values by clamp",
    ("early", "detached in 16 bits"): "its gradient of the input does not in torch.bfloat16",
    ("effect", "attribute"): EFFECT,
    ("effect", "count"): EFFECT,
    ("effect", "list"): EFFECT,
    ("effect", "in place"): EFFECT,
    ("effect", "parameter"): EFFECT,
    ("effect", "global"): "its forward changes variables outside of has_effect",
    ("effect", "closure"): "its forward changes variables outside of forward",
    ("effect", "print"): "its forward calls print",
    ("effect", "warning"): "its forward calls warn",
    ("effect", "noise"): "its forward draws random numbers",
    ("effect", "hook"): "its forward calls register_hook",
}


def custom(forward=norms.Custom.forward, **attributes):
    """An RMSNorm with another forward, and with more attributes or others."""
    module = type("CustomNorm", (norms.Custom,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def detached_mean(self, x):
    return norms.rms(x - x.mean(-1, keepdim=True).detach(), self.eps) * self.weight


def over_channels(self, x):
    if x.dim() < 4:
        return norms.rms(x, self.eps) * self.weight
    return norms.rms(x, self.eps, 1) * self.weight[:, None, None]


def raises(self, x):
    raise AssertionError("not today")


def with_plain_tensor():
    module = custom()
    del module.weight
    module.weight = torch.ones(N)
    return module


def replaced_forward():
    module = norms.Custom()
    module.forward = lambda x: x
    return module


OTHER_TENSORS = "it has tensors that are not parameters"
NOT_RECOGNISED = {
    "detached mean": (
        lambda: custom(detached_mean),
        "outputs match layer_norm.*gradient of the input does not",
    ),
    "detached weight": (
        lambda: custom(lambda self, x: norms.rms(x, self.eps) * self.weight.detach()),
        "outputs match rms_norm.*gradient of weight does not",
    ),
    "another scale": (norms.ScaledRMSNorm, NO_NORM),
    "no norm": (lambda: custom(lambda self, x: x + 1, weight=None), NO_NORM),
    "other dimensions of images": (lambda: custom(over_channels), ROUNDS_DIFFERENTLY),
    "another shape": (
        lambda: custom(lambda self, x: (norms.rms(x, self.eps) * self.weight).mean(-2)),
        r"its forward maps shape \[4, 8, 24\] to \[4, 24\]",
    ),
    "GroupNorm": (lambda: nn.GroupNorm(2, N), "with channels before others"),
    "BatchNorm": (lambda: nn.BatchNorm1d(N), OTHER_TENSORS),
    "a buffer": (lambda: custom(scale=nn.Buffer(torch.ones(()))), OTHER_TENSORS),
    "a tensor": (with_plain_tensor, OTHER_TENSORS),
    "more parameters": (
        lambda: custom(a=nn.Parameter(torch.ones(2))),
        r"its parameters are weight \[24\], a \[2\]",
    ),
    "a submodule": (lambda: custom(inner=nn.Linear(N, N)), "it has submodules"),
    "a forward of its own": (replaced_forward, "its forward was replaced on this instance"),
    "one element": (lambda: nn.LayerNorm(1), "its rows have one element"),
    "no subclass": (norms.NoSubclassNorm, "trying it raised TypeError: has no subclasses"),
    "a forward that raises": (
        lambda: custom(raises, weight=nn.Parameter(torch.ones(1, 1, N))),
        "its forward raised AssertionError: not today",
    ),
    "tilenorm's": (lambda: tilenorm.RMSNorm(N), "it is a tilenorm module"),
}
NOT_RECOGNISED |= {
    f"{part} {value}": (partial(drawn_norms.with_part, part, value), reason)
    for (part, value), reason in PARTS.items()
}


@pytest.mark.parametrize("name", NOT_RECOGNISED)
def test_is_not_recognised(name):
    make, reason = NOT_RECOGNISED[name]
    module = make()
    cls, attributes = type(module), dict(vars(module))
    report = tilenorm.patch(module)
    assert type(module) is cls and vars(module) == attributes
    assert not report.patched
    [entry] = report.left
    assert entry.cls is cls
    assert re.search(reason, entry.reason)


def test_a_module_that_is_left_stops_no_other():
    """Whatever its parameters, and whatever it raises."""
    odd = {re.sub(r"\W", "_", name): make() for name, (make, _) in NOT_RECOGNISED.items()}
    report = tilenorm.patch(
        nn.ModuleDict({**odd, "lazy": nn.LazyBatchNorm1d(), "ln": nn.LayerNorm(N)})
    )
    assert [entry.name for entry in report.patched] == ["ln"]
    assert len([e for e in report.left if "." not in e.name]) == len(odd) + 1


def test_mixed_dtypes_of_a_norm_with_the_weights_dtype():
    """The class's own forward runs, and tilenorm serves a call with one dtype."""
    for dtype, parameter in product(DTYPES, DTYPES):
        module, x = norms.WeightDtypeNorm().to(parameter), random(5, N, dtype=dtype)
        patched = copy.deepcopy(module)
        tilenorm.patch(patched)
        assert torch.equal(patched(x), module(x)) or dtype == parameter == torch.float32
        with mock.patch.object(norms.WeightDtypeNorm, "forward", autospec=True) as forward:
            patched(x)
        assert forward.called == (dtype != parameter)


def test_module_that_does_not_look_like_a_norm_is_not_reported():
    report = tilenorm.patch(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Embedding(3, 4)))
    assert report.patched == report.left == ()


def test_recognition_has_no_side_effects():
    module = norms.GatedNorm()
    module.register_forward_hook(lambda *_: pytest.fail("a hook was called"))
    parameter, values = module.weight, module.weight.detach().clone()
    state = torch.get_rng_state()
    tilenorm.patch(nn.Sequential(module, drawn_norms.with_part("effect", "noise")))
    assert torch.equal(torch.get_rng_state(), state)
    assert module.weight is parameter and parameter.grad is None
    assert torch.equal(parameter, values)


CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_recognised_in_any_context(context):
    modules = norms.Custom(), nn.LayerNorm(N), norms.Custom().to("meta")
    with context():
        reports = [tilenorm.patch(module) for module in modules]
    assert [report.patched[0].how for report in reports] == [RMS, LAYER, RMS]


def test_under_a_profiler():
    """cProfile's profile function cannot be set again once another one was set."""
    model, other = (nn.Sequential(nn.RMSNorm(16), nn.LayerNorm(16)) for _ in range(2))
    tilenorm.patch(other)
    with cProfile.Profile() as profile:
        assert len(tilenorm.patch(model).patched) == 2
        assert sys.getprofile() is profile
    assert [*map(type, model)] == [*map(type, other)]  # a class for each form


@pytest.mark.parametrize("refused", [False, True])
def test_finalizers_do_not_run_while_a_forward_is_watched(refused):
    """What they do would count as the forward's."""

    class Watched(norms.Custom):
        def forward(self, x):
            assert not gc.isenabled() and not refused
            return super().forward(x)

    twin = twin_of(Watched(), torch.float32)
    with pytest.raises(Refused) if refused else nullcontext():
        run(twin, random(3, N))
    assert gc.isenabled()
