"""Which modules tilenorm.patch recognises by their results, and its reasons for the others."""

import copy
import cProfile
import gc
import logging
import re
import sys
import threading
import tracemalloc
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

import tilenorm
from tests.support.calls import EACH_DEVICE, random
from tests.support.tolerance import FLOAT32_UNITS
from tilenorm.integrations.patch.twin import Refused, run, twin_of
from tilenorm.ops import functional

from . import norms
from .drawn_norms import gated_norm, with_parts
from .norms import N

RMS = "rms_norm offset=0.0 rounding=late eps=1e-06"
LAYER = "layer_norm offset=0.0 rounding=late eps=1e-05"
EARLY = RMS.replace("late", "early") + " output_dtype=promote_types(input, weight)"
DRAWN = RMS.replace("-06", "-05")
ONE_DTYPE = RMS.replace("late", "early") + ", or its own forward for mixed dtypes"
ROUNDED_OFFSET = RMS.replace("=0.0", "=1.0 (rounded to the weight's dtype)")
GROUPS = "gated_" + EARLY.replace(
    " output", " groups=3 norm_before_gate=False activation=silu output"
)
RECOGNISED = {
    "LayerNorm without bias": (lambda: nn.LayerNorm(N, bias=False), LAYER),
    "LayerNorm without weight": (lambda: nn.LayerNorm(N, elementwise_affine=False), LAYER),
    "LayerNorm of two dimensions": (lambda: nn.LayerNorm((4, N)), LAYER),
    "LayerNorm in float64": (lambda: nn.LayerNorm(N, dtype=torch.float64), LAYER),
    "RMSNorm": (lambda: nn.RMSNorm(N), RMS.replace("1e-06", "None")),
    "without a telling name": (norms.Scale, RMS.replace("0.0", "1.0")),
    "no images": (lambda: with_parts({"view": "no images"}), DRAWN),
    "gate first": (gated_norm, f"gated_{DRAWN} norm_before_gate=False activation=silu"),
    "sigmoid gate of a LayerNorm": (
        lambda: with_parts({"norm": "layer", "bias": True, "second": "gate", "gate": "sigmoid"}),
        f"gated_{LAYER} norm_before_gate=True activation=sigmoid",
    ),
    "the weight's dtype": (lambda: with_parts({"x̂": "weight"}), ONE_DTYPE.replace("-06", "-05")),
    "litgpt's Gemma": (lambda: norms.UnitOffset(), ROUNDED_OFFSET),
    "RMSGainCenterNorm": (lambda: norms.GainCenter(1.0), ROUNDED_OFFSET),
    "Cohere by heads": (lambda: CohereLayerNorm((4, N)), LAYER),
    "Llama": (lambda: LlamaRMSNorm(N), EARLY),
    "Qwen3-Next gated": (
        lambda: Qwen3NextRMSNormGated(N),
        f"gated_{RMS} norm_before_gate=True activation=silu".replace("late", "early"),
    ),
    "T5": (lambda: T5LayerNorm(N), ONE_DTYPE),
    "Zamba 2 in groups": (lambda: Zamba2RMSNormGated(N, 8), GROUPS),
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@EACH_DEVICE
@pytest.mark.parametrize("name", RECOGNISED)
@pytest.mark.filterwarnings("ignore:Mismatch dtype", "ignore::tilenorm.ReferenceWarning")
def test_is_recognised_and_keeps_values_and_dtype(name, device):
    make, how = RECOGNISED[name]
    module = make()
    with torch.no_grad():
        for seed, tensor in enumerate(module.parameters()):
            tensor.copy_(random(*tensor.shape, seed=seed))
    patched = copy.deepcopy(module)
    report = tilenorm.patch(patched)
    assert [entry.how for entry in report.patched] == [how] and not report.left
    shape = (5, *next((p.shape for p in module.parameters()), (N,)))
    shape = (4, *shape)[-3:]
    for dtype, parameter, autocast in product(DTYPES, DTYPES, (False, True)):
        module, patched = module.to(device, parameter), patched.to(device, parameter)
        tensors = [random(*shape, dtype=dtype, device=device, seed=seed) for seed in (5, 6)]
        tensors = tensors if "gated" in how else tensors[:1]
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            try:
                expected = module(*tensors).detach()
            except RuntimeError:  # PyTorch's norms do not accept every pair of dtypes
                assert dtype != parameter
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
    ("norm", "another scale"): NO_NORM,
    ("norm", "detached mean"): "outputs match layer_norm.*gradient of the input does not",
    ("shape", (3, 1)): r"its parameters are g \[3, 1\], not a number for each column",
    ("shape", (2, 3, 8)): r"its parameters have shape \[2, 3, 8\], more than a row for each head",
    ("shape", (0,)): r"its parameters are empty \(g \[0\]\)",
    ("early", "no gradients"): "but not for a run without gradients",
    ("early", "strided"): "but not for strided inputs",
    ("early", "too long"): "its forward branches on sizes",
    ("early", "large"): "its forward branches on values",
    ("early", "clamped"): "its forward selects values by clamp",
    ("early", "detached in 16 bits"): "its gradient of the input does not in torch.bfloat16",
    ("effect", "count"): EFFECT,
    ("effect", "list"): EFFECT,
    ("effect", "in place"): EFFECT,
    ("effect", "global"): "its forward changes variables outside of has_effect",
    ("effect", "closure"): "its forward changes variables outside of forward",
    ("effect", "print"): "its forward calls print",
    ("effect", "noise"): "its forward draws random numbers",
}


def custom(forward=norms.Custom.forward, **attributes):
    """An RMSNorm with another forward, and with more attributes or others."""
    module = type("CustomNorm", (norms.Custom,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def over_channels(self, x):
    weight = self.weight if x.dim() < 4 else self.weight[:, None, None]
    return norms.rms(x, self.eps, -1 if x.dim() < 4 else 1) * weight


class NoSubclassNorm(norms.Custom):
    def __init_subclass__(cls):
        raise TypeError("has no subclasses")


class OwnClass(nn.LayerNorm):
    """What refuses another class."""

    __class__ = property(lambda self: OwnClass)


def raising(error):
    def forward(self, x):
        raise error

    return lambda: custom(forward)


def of_triton():
    """As fla's norms, without a GPU."""
    names: dict = {"__name__": "triton.runtime.driver"}
    exec("def launch(): raise RuntimeError('0 active drivers ([]). There should be one.')", names)
    return custom(lambda self, x: names["launch"]())


LOG = "import logging\ndef first(): logging.getLogger('tests').debug('')"
READ = "def first(): open(__file__).close()"
IMPORT = "def first(): import tests.integrations.once"


def calling(package: str, code: str):
    """A norm whose forward first calls `first`, a function of the code in a module of a package."""
    names: dict = {"__name__": f"{package}.first_call", "__file__": __file__}
    exec(code, names)

    def forward(self, x):
        names["first"]()
        return norms.Custom.forward(self, x)

    return custom(forward)


@pytest.mark.parametrize(
    "package, code, reason",
    [
        ("torch", LOG, None),
        ("triton", READ, None),
        ("mine", IMPORT, None),
        ("mine", LOG, "its forward logs"),
        ("mine", READ, "its forward calls open"),
    ],
)
def test_what_a_first_call_does_once_is_no_effect(package, code, reason, caplog, monkeypatch):
    """PyTorch may log when it first uses a GPU, and Triton compiles."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.delitem(sys.modules, "tests.integrations.once", raising=False)
    report = tilenorm.patch(calling(package, code))
    assert [entry.reason for entry in report.left] == ([reason] if reason else [])


def emptied_by_deepspeed():
    module = custom()
    module.weight = nn.Parameter(torch.empty(0))
    module.weight.ds_id = 1
    return module


OTHER_TENSORS = "it has other tensors than parameters: "
FOR_GPUS = "^its forward does not run on the CPU, and patch has found no GPU that runs it: "
CPU_BACKEND = "Could not run '_C::rms_norm' with arguments from the 'CPU' backend"
WITHOUT_EPS = r"^it is a norm without an eps .* tilenorm.compile\(inexact=True\) replaces that$"
NOT_RECOGNISED = {
    "F.normalize": (
        lambda: custom(lambda self, x: F.normalize(x, dim=-1) * N**0.5 * self.weight),
        WITHOUT_EPS,
    ),
    "F.normalize, 1 + weight": (
        lambda: custom(lambda self, x: F.normalize(x, dim=-1) * N**0.5 * (1 + self.weight)),
        WITHOUT_EPS,
    ),
    "F.normalize by itself": (lambda: custom(lambda self, x: F.normalize(x, dim=-1)), NO_NORM),
    "other dimensions of images": (lambda: custom(over_channels), "with channels before others"),
    "another shape": (
        lambda: custom(lambda self, x: (norms.rms(x, self.eps) * self.weight).mean(-2)),
        r"its forward maps shape \[4, 8, 24\] to \[4, 24\]",
    ),
    "GroupNorm": (lambda: nn.GroupNorm(2, N), "with channels before others"),
    "BatchNorm": (lambda: nn.BatchNorm1d(N), OTHER_TENSORS + "running_mean, running_var"),
    "a tensor": (lambda: custom(scale=torch.ones(())), OTHER_TENSORS + "scale$"),
    "more parameters": (
        lambda: custom(a=nn.Parameter(torch.ones(2))),
        r"its parameters are weight \[24\], a \[2\]",
    ),
    "a submodule": (lambda: custom(inner=nn.Linear(N, N)), "it has submodules"),
    "one element": (lambda: nn.LayerNorm(1), "its rows have one element"),
    "no subclass": (NoSubclassNorm, "trying it raised TypeError in line .* of test_rec"),
    "no other class": (lambda: OwnClass(N), "trying it raised"),
    "a forward that raises": (
        lambda: custom(lambda self, x: self.not_there),
        "^its forward raised AttributeError in line [0-9]+ of test_recognition.py$",
    ),
    "Triton's": (of_triton, FOR_GPUS),
    "apex'": (
        raising(RuntimeError("input must be a CUDA tensor")),
        FOR_GPUS + r"RuntimeError in line .* \(input must be a CUDA tensor\)$",
    ),
    "vLLM's": (
        raising(NotImplementedError(CPU_BACKEND)),
        FOR_GPUS + rf"NotImplementedError in line .* \({CPU_BACKEND}\)$",
    ),
    "DeepSpeed ZeRO 3": (
        emptied_by_deepspeed,
        r"^DeepSpeed ZeRO 3 .* within deepspeed.zero.GatheredParameters\(model.parameters\(\)\)$",
    ),
    "tilenorm's": (lambda: tilenorm.RMSNorm(N), "it is a tilenorm module"),
}
NOT_RECOGNISED |= {
    f"{part} {value}": (partial(with_parts, {part: value}), reason)
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


# Forwards in which PyTorch or tilenorm raises.
RAISING = {
    "dimensions": lambda self, x: x.permute(0, 3, 1, 2) * self.weight,
    "attribute": lambda self, x: x * self.not_there,
    "tilenorm": lambda self, x: tilenorm.rms_norm(x, (7,)),
}


@pytest.mark.parametrize("name", RAISING)
def test_a_reason_has_no_text_of_an_exception(name):
    module = custom(RAISING[name])
    with pytest.raises((RuntimeError, ValueError, AttributeError)) as raised:
        type(module).forward(module, random(3, N))
    [entry] = tilenorm.patch(module).left
    words = str(raised.value).split()
    assert not any(" ".join(words[n : n + 3]) in entry.reason for n in range(len(words) - 2))
    assert f"in line {RAISING[name].__code__.co_firstlineno} of test_rec" in entry.reason


def test_a_module_that_is_left_stops_no_other():
    """What looks like no norm has no entry."""
    odd = nn.LazyBatchNorm1d(), NoSubclassNorm(), OwnClass(N)
    report = tilenorm.patch(nn.Sequential(*odd, nn.LayerNorm(N), nn.Embedding(3, 4)))
    assert [entry.name for entry in report.patched] == ["3"]
    assert [entry.name for entry in report.left] == ["0", "1", "2"]


@contextmanager
def traced_allocations():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@contextmanager
def debugger():
    """A trace function of all threads, which is no part of a watched forward."""
    counts = []

    def trace(*_):
        counts.append(1)
        return trace

    threading.settrace(trace)
    yield
    threading.settrace(None)
    assert len(counts) < 10_000


@contextmanager
def global_hooks():
    calls = []
    hooks = register_module_forward_pre_hook, register_module_forward_hook
    handles = [register(lambda *_: calls.append(1)) for register in hooks]
    yield
    for handle in handles:
        handle.remove()
    assert not calls


@contextmanager
def several():
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
        global_hooks(),
    ):
        yield


CONTEXTS = {
    "no_grad, autocast, a default device and global hooks": several,
    "inference_mode": torch.inference_mode,
    "a profiler": cProfile.Profile,  # whose function cannot be set again once another one was set
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "tracemalloc": traced_allocations,
    "a debugger": debugger,
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_recognised_in_any_context(context):
    """Without hooks, and without random numbers that others would have drawn."""
    modules = norms.Custom(), nn.LayerNorm(N), norms.Custom().to("meta")
    modules[0].register_forward_hook(lambda *_: pytest.fail("a hook was called"))
    noise, state = with_parts({"effect": "noise"}), torch.get_rng_state()
    with context():
        profile = sys.getprofile()
        reports = [tilenorm.patch(module) for module in (*modules, noise)]
        assert sys.getprofile() is profile
    assert [report.patched[0].how for report in reports[:-1]] == [RMS, LAYER, RMS]
    assert torch.equal(torch.get_rng_state(), state)
    weight = modules[0].weight
    assert weight.grad is None and torch.equal(weight, torch.ones_like(weight))


def test_anomaly_mode_is_off_while_a_forward_is_watched():
    """PyTorch would call functions of traceback, and take minutes."""

    class Watched(norms.Custom):
        def forward(self, x):
            assert not torch.is_anomaly_enabled()
            return super().forward(x)

    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert tilenorm.patch(Watched()).patched
        assert torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled()


class Deep(norms.Custom):
    """Computes, or refuses, something else from a number of dimensions on."""

    def __init__(self, most, refuses):
        super().__init__()
        self.most, self.refuses = most, refuses

    def forward(self, x):
        if x.dim() > self.most and self.refuses:
            raise ValueError(f"at most {self.most} dimensions")
        return super().forward(x) * (1 + (x.dim() > self.most))


# A module, up to how many dimensions tilenorm serves, and what the report says of others.
DEEP = {
    "LayerNorm": (lambda: nn.LayerNorm(N), 60, ""),
    "Llama": (lambda: LlamaRMSNorm(N), 60, ""),
    "no images": (lambda: with_parts({"view": "no images", "shape": (N,)}), 60, ""),
    "other large numbers": (lambda: Deep(20, False), 9, "inputs of 10 or more dimensions"),
    "refused": (lambda: Deep(7, True), 7, ""),
}


@pytest.mark.parametrize("name", DEEP)
def test_serves_every_number_of_dimensions_that_the_forward_takes(name, monkeypatch):
    make, most, own = DEEP[name]
    module = make()
    expected = copy.deepcopy(module)
    (entry,) = tilenorm.patch(module).patched
    assert entry.how.partition(", or its own forward for ")[2] == own
    served = []
    for norm in ("rms_norm", "layer_norm"):
        function = getattr(functional, norm)
        counted = partial(lambda f, *args, **how: served.append(1) or f(*args, **how), function)
        monkeypatch.setattr(functional, norm, counted)
    for dims in (1, 2, 3, 5, 6, 7, 8, 9, 10, 20, 30, 60):
        x = random(*(2,) * min(dims - 1, 5), *(1,) * (dims - 6), N)
        served.clear()
        if name == "refused" and dims > most:
            with pytest.raises(ValueError, match="at most 7"):
                module(x)
            continue
        torch.testing.assert_close(module(x), expected(x))
        assert bool(served) == (dims <= most), dims


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
