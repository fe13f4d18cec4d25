"""Which implementation serves, and how the others' refusals are told."""

import warnings
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import cuda.tile._compile as cutile_compiler
import pytest
import torch

import tilenorm
from tests.support import stand_in_driver
from tests.support.calls import EACH_FORM, FAMILY, call, step, tensors_of
from tilenorm.launch import toolchain
from tilenorm.launch.target import MULTIPROCESSORS, Target
from tilenorm.ops.passes import reference, registry
from tilenorm.ops.passes.registry import MAX_HIDDEN, MAX_ROWS, Device, refusals, select
from tilenorm.spec import NormSpec, Rotation
from tilenorm.table import NORMS

pytestmark = pytest.mark.usefixtures("no_memory")

SPEC = NormSpec("rms", 4096, "bfloat16", "bfloat16")
H200 = Device("cuda", Target.of("sm_90"), 13000)
CPU = Device("cpu")

OLD_DRIVER = Device("cuda", Target.of("sm_90"), 12080)
TURING = Device("cuda", Target("sm_75", 72), 13000)
# Of each: the spec, what is said, the device, and how many rows there are.
REFUSED = [
    (SPEC, "the input is on cpu", CPU, 1),
    (SPEC, "the input is on meta", Device("meta"), 1),
    (SPEC, r"serves CUDA 12; cuTile takes CUDA 13 \(r580\)", OLD_DRIVER, 1),
    (SPEC, "sm_75: cuTile compiles for", TURING, 1),
    (SPEC, "has 1073741825 rows; the kernels take up to", H200, MAX_ROWS + 1),
    (NormSpec("rms", 64, "float64"), "input is float64; the kernels", H200, 1),
]
ROPE = NormSpec("rms", 64, "bfloat16", rotation=Rotation(64, 64))
BY_TOKEN = replace(ROPE, hidden=640, key="bfloat16", key_hidden=64 * 129)
REFUSED += [
    (NormSpec("rms", 8200, "bfloat16", mod_scale="bfloat16"), "rows are modulated", H200, 1),
    (NormSpec("rms", 8, "bfloat16", mod_scale="float64"), "scale is float64", H200, 1),
    (replace(ROPE, rotation=Rotation(64, 64, table="float64")), "cos is float64", H200, 1),
    (NormSpec("rms", 1024, "bfloat16", rotation=Rotation(64, 1024)), "up to 512 elem", H200, 1),
    (BY_TOKEN, "up to 8192", H200, 1),
]
REFUSED += [
    (NormSpec("rms", n, "float32"), f"holds {n} elements; the kernels take 1 to 262144", H200, 1)
    for n in (0, MAX_HIDDEN + 1)
]
REFUSED += [
    (NormSpec.of(op, 64, "float32", **{name: "float64"}), f"{name} is float64", H200, 1)
    for op in ("rms_norm", "add_rms_norm", "gated_rms_norm")
    for name in ("weight", "bias", FAMILY[op].other)
    if name
]


@pytest.mark.parametrize("spec, reason, device, rows", REFUSED)
def test_refused(spec, reason, device, rows):
    with pytest.warns(
        tilenorm.ReferenceWarning, match=f"reference runs instead of cutile.*{reason}"
    ):
        assert select(spec, rows, device, None).name == "reference"
    with pytest.raises(RuntimeError, match=f"backend 'cutile' was asked for, but .*{reason}"):
        select(spec, rows, device, "cutile")
    assert refusals(spec, rows, device)["reference"] is None


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("arch", MULTIPROCESSORS)
def test_served_on_every_architecture_to_the_ends_of_the_range(arch, op):
    device = Device("cuda", Target.of(arch), 13000)
    for hidden, dtype in product((1, 4096, MAX_HIDDEN), registry.DTYPES):
        spec = NormSpec.of(op, hidden, dtype, weight="float32", bias="float32", offset=1.0)
        assert refusals(spec, MAX_ROWS, device) == {"cutile": None, "reference": None}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert select(spec, MAX_ROWS, device, None).name == "cutile"


@pytest.mark.parametrize("version", [12080, 13000])
def test_the_driver_itself_says_how_old_it_is(version, monkeypatch, tmp_path):
    """cuTile raises RuntimeError where the driver is older than CUDA 13."""
    monkeypatch.setattr(toolchain, "DRIVER", str(stand_in_driver.built(tmp_path)))
    monkeypatch.setenv("STAND_IN_CUDA", str(version))
    gpus = {"NVIDIA H200": "sm_90", "NVIDIA H100 80GB HBM3": "sm_90_H100"}
    for index, (name, target) in enumerate(gpus.items()):
        gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, gpu=gpu: gpu)
        device = registry.device_of("cuda", index)
        assert device == Device("cuda", Target.of(target), version)
    assert (refusals(SPEC, 1, device)["cutile"] is None) == (version == 13000)


def test_the_cpu_asks_for_no_compiler(monkeypatch):
    def find():
        raise AssertionError("looked for the compiler")

    monkeypatch.setattr(cutile_compiler, "_find_compiler_bin", find)
    select(SPEC, 1, CPU, None)


TAKES = "takes 'cutile' or 'reference' or None"


def test_an_unknown_backend_names_the_function():
    x, unknown = torch.ones(2, 8), f"argument 'backend' {TAKES}, got 'triton'"
    for function in (tilenorm.rms_norm, torch.compile(tilenorm.rms_norm, backend="eager")):
        with pytest.raises(ValueError, match=f"rms_norm: {unknown}"):
            function(x, (8,), backend="triton")
    with pytest.raises(ValueError, match=f"rms_norm_add_rms_norm: {unknown}"):
        tilenorm.rms_norm_add_rms_norm(x, x, (8,), backend="triton")
    with pytest.raises(ValueError, match=f"rms_norm: {unknown}"):
        torch.ops.tilenorm.rms_norm(x, None, None, 8, 0.0, "late", 1e-5, False, "triton")


def test_backend_of_the_environment(monkeypatch):
    x = torch.ones(2, 8)
    for backend, kind, message in (
        ("cutile", RuntimeError, "backend 'cutile' was asked for, but the input is on"),
        ("triton", ValueError, f"rms_norm: TILENORM_BACKEND {TAKES}, got 'triton'"),
        ("Cutile", ValueError, f"rms_norm: TILENORM_BACKEND {TAKES}, got 'Cutile'"),
    ):
        monkeypatch.setenv("TILENORM_BACKEND", backend)
        with pytest.raises(kind, match=message):
            tilenorm.rms_norm(x, (8,))
    monkeypatch.setenv("TILENORM_BACKEND", "cutile")
    tilenorm.rms_norm(x, (8,), backend="reference")
    monkeypatch.setenv("TILENORM_BACKEND", "")
    tilenorm.rms_norm(x, (8,))


@EACH_FORM
def test_an_implementation_of_a_user_is_one_entry(form, monkeypatch):
    """It refuses, is preferred, is asked for by name, and gets the calls of both directions."""
    seen = []

    def refuses(spec, rows, device):
        return "it takes 8 columns" if spec.hidden != 8 else None

    def forward(spec, device, save):
        seen.append(("forward", spec.op, device.kind, save))
        return reference.bind_forward(spec)

    def backward(spec, device, needs):
        seen.append(("backward", needs.dx))
        return reference.bind_backward(spec, needs)

    mine = registry.Implementation("mine", refuses, forward, backward)
    monkeypatch.setattr(registry, "REGISTRY", (mine, *registry.REGISTRY))
    tensors = tensors_of(form, 3, 8)
    for options in ({}, {"backend": "mine"}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = step(form, tensors, **options)
        assert ("forward", form.op, "cpu", True) in seen and ("backward", True) in seen
        seen.clear()
        expected = step(form, tensors, backend="reference")
        assert not seen and got.keys() == expected.keys()
        for name in got:
            torch.testing.assert_close(got[name], expected[name])
    wide = tensors_of(form, 3, 16)
    with pytest.warns(tilenorm.ReferenceWarning, match="instead of mine: it takes 8 columns"):
        call(form, wide)
    with pytest.raises(RuntimeError, match="'mine' was asked for, but it takes 8 columns"):
        call(form, wide, backend="mine")
    assert not seen
