import os
import warnings

import pytest
import torch

import tilenorm
from tests.support.calls import CALLS, DEVICES, Form
from tests.support.pretended import CACHES, GPU, by, forgotten, pretended_gpu
from tests.support.stand_in_compiler import compiling_gpu
from tests.support.stand_in_cxx import Cxx
from tilenorm.launch import plan, toolchain
from tilenorm.ops.passes import cutile, native, reference, registry
from tilenorm.ops.passes.native import build
from tilenorm.tools import fingerprint, info, precompile
from tilenorm.tools.cubin import Resources


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    """Where the tensors of a test are."""
    return request.param


@pytest.fixture(params=["reference", "kernels", "extension"])
def served(request) -> str:
    """What serves calls on a CPU, in a block of `by`: the reference, or interpreted kernels, which
    Python launches, or the extension in C++.
    """
    if request.param == "extension":
        request.getfixturevalue("extension")
    return request.param


@pytest.fixture(params=CALLS.values(), ids=CALLS)
def form(request) -> Form:
    """Each call of a plain norm, where a test does not choose others."""
    return request.param


@pytest.fixture(params=["rms", "layer"])
def norm(request) -> str:
    return request.param


@pytest.fixture
def way(served, device):
    """In the test, calls are served in each way."""
    with by(served, device):
        yield


@pytest.fixture
def no_memory():
    """What was decided before the test is forgotten, and so is what the test decides."""
    caches = toolchain.compiler_problem, toolchain.toolkit_problem, registry.device_of
    with forgotten(*CACHES, *caches, plan.plan_forward, plan.plan_backward):
        yield


@pytest.fixture
def in_python():
    """In the test no extension in C++ serves, also with --native."""
    extension = native.state().extension
    native.state().use(None)
    yield
    native.state().use(extension)


@pytest.fixture(scope="session")
def loaded_extension(extension_file):
    """The extension in C++ of this session, or None where there is no compiler."""
    return extension_file and (native.state().extension or build.load(extension_file))


@pytest.fixture
def extension(loaded_extension):
    """The extension in C++ is in service."""
    if loaded_extension is None:
        pytest.skip(build.refused() or build.missing())
    before = native.state().extension
    native.state().use(loaded_extension)
    yield loaded_extension
    native.state().use(before)


@pytest.fixture
def by_extension(extension, no_memory):
    """The extension serves CPU tensors as on a GPU; the kernels are interpreted."""
    with pretended_gpu():
        yield


@pytest.fixture
def build_folder(tmp_path, monkeypatch):
    """Where the extension is built in the test. The folder is not there yet."""
    monkeypatch.setenv("TILENORM_CACHE_DIR", str(tmp_path / "cache"))
    build.path.cache_clear()
    yield tmp_path / "cache" / "native"
    build.path.cache_clear()


@pytest.fixture
def cxx(build_folder, tmp_path, monkeypatch) -> Cxx:
    """A program in the place of the C++ compiler."""
    monkeypatch.setattr(os, "nice", lambda by: by)
    return Cxx(tmp_path, monkeypatch)


@pytest.fixture
def as_on_a_gpu(device, no_memory):
    """On a CPU, its tensors take CUDA's path."""
    if device == "cuda":
        yield
    else:
        with pretended_gpu():
            yield


@pytest.fixture(autouse=True)
def quiet():
    """These tests choose the backend themselves, and know that the reference runs on the CPU.

    The fixture `monkeypatch` would be made before those that pretend a GPU, and undone after them:
    what a test replaces of a pretended GPU would come back.
    """
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        patched.delenv("TILENORM_BACKEND", raising=False)
        warnings.simplefilter("ignore", tilenorm.ReferenceWarning)
        yield


@pytest.fixture
def gradients_made(no_memory, monkeypatch):
    """A list that gets, for each backward pass, the names of what gradients were computed of."""
    made = []
    names = ("input", "residual", "gate", "weight", "bias")

    def spy(function):
        def call(*args, **kwargs):
            outputs = function(*args, **kwargs)
            every = (*names, *range(len(names), len(outputs)))  # more of modulated and rotated ones
            made.append({n for n, t in zip(every, outputs, strict=True) if t is not None})
            return outputs

        return call

    bind = cutile.bind_backward
    monkeypatch.setattr(cutile, "bind_backward", lambda *a, **k: spy(bind(*a, **k)))
    monkeypatch.setattr(reference, "backward", spy(reference.backward))
    return made


@pytest.fixture
def compiler(no_memory, compiler):
    """The compiler of a pretended GPU."""
    with pretended_gpu(), compiling_gpu():
        yield compiler


@pytest.fixture
def told():
    """tilenorm's warnings during the test, each time that one is given."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", tilenorm.ReferenceWarning)
        yield found


@pytest.fixture
def gpu_of_info(monkeypatch):
    """The command info finds a GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU")
    for module in (info, fingerprint):
        monkeypatch.setattr(module, "device_of", lambda *_: GPU)
    monkeypatch.setattr(info, "driver_version", lambda: 13000)
    monkeypatch.setattr(precompile, "resources", lambda cubin: Resources(0, 0, 0, 0, ""))
