"""Which modules tilenorm.patch recognises by their results, and its reasons for the others."""

import re
from itertools import product

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

import tilenorm

from ..ops.helpers import EACH_DEVICE, random
from ..tolerance import FLOAT32_UNITS
from . import norms
from .norms import N

RMS = "rms_norm offset=0.0 rounding=late eps=1e-06"
LAYER = "layer_norm offset=0.0 rounding=late eps=1e-05"
EARLY = RMS.replace("late", "early") + " output_dtype=promote_types(input, weight)"
GATED = f"gated_{RMS} norm_before_gate="
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
    "hard-coded eps": (lambda: norms.HardCodedNorm(), RMS.replace("1e-06", "1e-08")),
    "cast around": (lambda: norms.Float32LayerNorm(N), LAYER),
    "a subclass": (lambda: norms.SameLayerNorm(N), LAYER),
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
    for dtype, parameter in product(DTYPES, DTYPES):
        module = make().to(device, parameter)
        with torch.no_grad():
            for seed, tensor in enumerate(module.parameters()):
                tensor.copy_(random(*tensor.shape, seed=seed))
        shape = (5, 4, next((p.shape[-1] for p in module.parameters()), N))
        tensors = [random(*shape, dtype=dtype, device=device, seed=seed) for seed in (5, 6)]
        tensors = tensors if "gated" in how else tensors[:1]
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            try:
                expected = module(*tensors).detach()
            except RuntimeError:  # PyTorch's norms do not accept every pair of dtypes
                assert dtype != parameter or "cast" in name
                continue
            tilenorm.patch(module)
            got = module(*tensors)
        assert got.dtype == expected.dtype
        close = FLOAT32_UNITS * torch.finfo(dtype).eps
        torch.testing.assert_close(got, expected, rtol=close, atol=close * expected.abs().max())


NO_NORM = "its outputs match no norm of tilenorm"
ROUNDS_DIFFERENTLY = "rounds or casts 16 bits differently"
NOT_RECOGNISED = {
    "detached mean": (
        norms.DetachedLayerNorm,
        "outputs match layer_norm.*gradient of the input does not",
    ),
    "detached weight": (
        norms.FrozenRMSNorm,
        "outputs match rms_norm.*gradient of weight does not",
    ),
    "another scale": (norms.ScaledRMSNorm, NO_NORM),
    "eps outside the root": (norms.OuterEpsRMSNorm, NO_NORM),
    "another eps": (norms.OtherEpsRMSNorm, NO_NORM),
    "over the batch": (norms.BatchRMSNorm, NO_NORM),
    "other dimensions of images": (norms.ChannelsFirstRMSNorm, "its forward raised"),
    "another shape": (norms.PoolingRMSNorm, r"its forward maps shape \[3, 8, 24\] to \[3, 24\]"),
    "dropout in training": (norms.NoisyRMSNorm, NO_NORM),
    "an output in float32": (norms.Float32OutputRMSNorm, ROUNDS_DIFFERENTLY),
    "a rounded offset": (norms.RoundedOffsetRMSNorm, ROUNDS_DIFFERENTLY),
    "an estimate of the variance": (norms.UnbiasedLayerNorm, NO_NORM),
    "a residual": (norms.ResidualRMSNorm, NO_NORM),
    "every operation in 16 bits": (norms.CoarseRMSNorm, ROUNDS_DIFFERENTLY),
    "T5": (lambda: T5LayerNorm(N), ROUNDS_DIFFERENTLY),
    "groups": (norms.GroupedRMSNorm, NO_NORM),
    "GroupNorm": (lambda: nn.GroupNorm(2, N), "its forward raised RuntimeError"),
    "BatchNorm": (lambda: nn.BatchNorm1d(N), "it has tensors that are not parameters"),
    "a buffer": (norms.BufferRMSNorm, "it has tensors that are not parameters"),
    "a tensor": (norms.PlainTensorRMSNorm, "it has tensors that are not parameters"),
    "more parameters": (norms.ManyParametersRMSNorm, r"its parameters are weight \[24\], a \[2\]"),
    "an option": (norms.FlagRMSNorm, r"its forward takes \(x, flip=False\)"),
    "two outputs": (norms.TwoOutputsRMSNorm, "its forward returns a tuple"),
    "a submodule": (norms.NestedRMSNorm, "it has submodules"),
    "a forward of its own": (norms.replaced_forward, "its forward was replaced on this instance"),
    "one element": (lambda: nn.LayerNorm(1), "its rows have one element"),
    "tilenorm's": (lambda: tilenorm.RMSNorm(N), "it is a tilenorm module"),
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


def test_module_that_does_not_look_like_a_norm_is_not_reported():
    report = tilenorm.patch(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Embedding(3, 4)))
    assert report.patched == report.left == ()


def test_recognition_has_no_side_effects():
    module = norms.GatedNorm()
    module.register_forward_hook(lambda *_: pytest.fail("a hook was called"))
    parameter, values = module.weight, module.weight.detach().clone()
    state = torch.get_rng_state()
    tilenorm.patch(nn.Sequential(module, norms.NoisyRMSNorm()))
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
