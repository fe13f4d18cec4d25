"""A compiler that cannot serve, or kernels that do not compile: the reference serves and fits what
was saved; one message has the remedy, from calls and from info.
"""

from functools import partial

import pytest
import torch
from cuda.tile import _compile
from cuda.tile._cext import default_tile_context

import tilenorm
from tests.support.calls import (
    CALLS,
    EPS,
    FAMILY,
    FEW,
    assert_step,
    expected_of,
    messages,
    random,
    same,
    slow,
    step,
    tensors_of,
)
from tests.support.pretended import GPU
from tests.support.stand_in_compiler import CRASH, ERROR, HANG, has_ptxas
from tilenorm.launch import toolchain
from tilenorm.table import NORMS
from tilenorm.tools import explain, info

pytestmark = [pytest.mark.any_torch, pytest.mark.usefixtures("no_memory")]

N = 64
NAMED = "its kernel row_forward does not compile for sm_90: "
HOW = {
    "crash": (CRASH, "Return code -11"),
    "hang": (HANG, "`tileiras` compiler exceeded timeout 0.2s"),
    "error": (ERROR, "Return code 5 out of registers"),
}


def norm(rows=5, **options):
    return tilenorm.rms_norm(random(rows, N), (N,), random(N, seed=1), eps=EPS, **options)


@pytest.mark.parametrize("how", HOW)
def test_the_reference_serves_and_the_kernel_is_named(how, compiler, told, monkeypatch):
    """By one warning, by `explain`, and by an exception where the kernels were asked for."""
    command, words = HOW[how]
    compiler.breaks(row_forward=command)
    compiler.ends_after(0.2 if how == "hang" else 60)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^rms_norm: backend 'cutile' .* but " + NAMED):
            norm(backend="cutile")
    assert messages(told) == []
    for rows in (5, 5, 16, 1):
        assert torch.equal(norm(rows), norm(rows, backend="reference"))
    [message] = messages(told)
    assert message.startswith(f"tilenorm: reference runs instead of cutile: {NAMED}{words}")
    assert message.endswith("(for rms_norm of 64 float32)")
    monkeypatch.setattr(explain, "device_of", lambda *_: GPU)
    found = tilenorm.explain("rms_norm", random(5, N), (N,), random(N, seed=1))
    assert found.chosen == "reference"
    assert found.refused["cutile"].startswith(f"{NAMED}{words}")
    compiler.breaks()
    compiler.ends_after(60)
    tilenorm.layer_norm(random(5, N), (N,))  # the kernels serve another spec
    norm()  # the failed compilation is not tried again
    assert compiler.runs("row_forward") == 2 and len(messages(told)) == 1


FORMS = {"gated_rms_norm, gate first": "norm_backward", "add_layer_norm": "column_sum"}


@pytest.mark.parametrize("name, kernel", FORMS.items(), ids=FORMS)
def test_the_reference_computes_gradients_of_what_the_kernels_computed(
    name, kernel, compiler, told
):
    form = FAMILY[name]
    tensors = tensors_of(form, 5, N, dtype=torch.float16, parameter=torch.float32)
    compiler.breaks(**{kernel: ERROR})
    found = step(form, tensors)
    assert (compiler.runs("row_forward"), compiler.runs(kernel)) == (1, 1)
    assert_step(found, expected_of(form, tensors))
    # From now on the reference serves both directions.
    expected = step(form, tensors, backend="reference")
    for _ in range(2):
        assert same(step(form, tensors), expected)
    assert (compiler.runs("row_forward"), compiler.runs(kernel)) == (1, 1)
    [message] = messages(told)
    assert f"its kernel {kernel} does not compile" in message


def test_a_kernel_that_fails_later(compiler, told):
    """Another number of rows may compile anew. Gradients of earlier results are still computed."""
    x, w = random(5, N).requires_grad_(), random(N, seed=1).requires_grad_()
    before = tilenorm.rms_norm(x, (N,), w, eps=EPS)
    compiler.breaks(row_forward=ERROR)
    assert torch.equal(norm(16), norm(16, backend="reference"))
    assert compiler.runs("row_forward") == 2
    grads = torch.autograd.grad(before.sum(), (x, w))
    after = tilenorm.rms_norm(x, (N,), w, eps=EPS, backend="reference")
    torch.testing.assert_close(grads, torch.autograd.grad(after.sum(), (x, w)))
    assert compiler.runs("norm_backward") == 0
    assert len(messages(told)) == 1


@pytest.mark.parametrize("kernel", ["row_forward", *slow("norm_backward"), None])
def test_info_shows_it(kernel, compiler, gpu_of_info, monkeypatch):
    monkeypatch.setattr(info, "NORMS", ("rms_norm",))
    monkeypatch.setattr(info, "NOT_OF_ROWS", ())
    compiler.breaks(**({kernel: ERROR} if kernel else {}))
    lines, wrong = info.information()
    assert f"  rms_norm: {'reference' if kernel else 'cutile'}" in lines
    reason = f"its kernel {kernel} does not compile for sm_90: Return code 5 out of registers"
    assert wrong == ([reason] if kernel else [])
    assert (
        (f"    cutile refuses: {reason}" in lines) == (f"wrong: {reason}" in lines) == bool(kernel)
    )


@pytest.mark.parametrize("version, warns", {"13.4.92": False, "13.5.37": True}.items())
def test_info_warns_of_another_compiler_than_that_of_the_tables(
    version, warns, compiler, gpu_of_info, monkeypatch
):
    """It is no problem: the kernels serve."""
    monkeypatch.setattr(info, "NORMS", ())
    monkeypatch.setattr(info, "NOT_OF_ROWS", ())
    compiler.is_of(version)
    lines, wrong = info.information()
    told = [line for line in lines if line.startswith("  warning: the configurations for sm_90 ")]
    assert len(told) == warns and not wrong
    assert all(f"this is tileiras {version}" in line for line in told)


def test_a_folder_for_temporary_files_that_is_gone(compiler, told, monkeypatch):
    monkeypatch.setattr(default_tile_context.config, "temp_dir", str(compiler.folder / "none"))
    norm()
    assert "No such file or directory" in messages(told)[0]


SEARCH = _compile._find_compiler_bin.__wrapped__
VARIABLES = ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH")


def is_searched(compiler, monkeypatch) -> None:
    """cuTile finds the compiler as without its packages: on PATH or under CUDA_HOME."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{compiler.path.parent}:/usr/bin:/bin")
    monkeypatch.setattr(_compile, "_find_pip_tileiras", lambda: None)
    monkeypatch.setattr(_compile, "_get_default_cuda_toolkit_paths", lambda: [])
    monkeypatch.setattr(_compile, "_find_compiler_bin", SEARCH)


def fails(compiler, condition: str = "true") -> None:
    """The compiler fails on every kernel, as with a ptxas or libnvvm that is too old."""
    error = "echo 'error: failed to compile Tile IR program' >&2; exit 5"
    compiler.breaks(**{"": f"if {condition}; then {error}; fi"})


def toolkit(variable: str, compiler, monkeypatch) -> None:
    """A variable names a toolkit of CUDA 13.2, with which every compilation fails."""
    has_ptxas(compiler.folder / "old", "13.2.86")
    monkeypatch.setenv(variable, str(compiler.folder / "old"))
    fails(compiler, f'[ -n "${variable}" ]')


def unrunnable(compiler, _) -> None:
    compiler.path.write_text("#!/no/such/interpreter\n")


def alone(compiler, _) -> None:
    (compiler.folder / "bin" / "ptxas").unlink()
    fails(compiler)


# What is wrong, and what the message says of it.
USES = "{path} (tileiras 13.4.92) fails: it uses ptxas and libnvvm of "
BROKEN = {
    "absent": (lambda c, _: c.path.unlink(), "tileiras is missing (nvidia-cuda-tileiras "),
    "does not run": (unrunnable, "{path} does not run: "),
    "alone": (alone, USES + "{folder}, where ptxas is missing, and needs"),
} | {
    name: (
        partial(toolkit, name),
        USES + name + "={folder}/old, where ptxas is 13.2.86, and needs those of its own release: "
        "unset " + name,
    )
    for name in VARIABLES[:2]
}


@pytest.fixture(params=BROKEN)
def broken(request, compiler, monkeypatch) -> tuple:
    """The compiler, in which something is wrong, and what is said of it."""
    does, words = BROKEN[request.param]
    is_searched(compiler, monkeypatch)
    does(compiler, monkeypatch)
    return compiler, words.format(path=compiler.path, folder=compiler.folder)


def assert_reason(reason: str, words: str) -> None:
    """It is one line, and ends in what a user can do."""
    assert reason.startswith(f"its compiler {words}") and "\n" not in reason
    packages = (f'"{name}>=13.4,<14"' for name in toolchain.COMPILER_PACKAGES)
    pip = f"pip install {' '.join(packages)}"
    # The packages' tileiras sees CUDA_ROOT too.
    assert reason.endswith("unset CUDA_ROOT" if "CUDA_ROOT" in reason else pip)


def test_one_reason_for_every_spec(broken, told, gpu_of_info):
    """In exceptions, in what info says, and in one warning. No kernel is compiled in vain: cuTile
    tries small programs first, which fail, and then refuses kernels that wait for others.
    """
    compiler, words = broken
    for name in ("rms_norm", "rms_norm", "layer_norm"):
        with pytest.raises(RuntimeError) as raised:
            getattr(tilenorm, name)(random(5, N), (N,), backend="cutile")
        start = f"{name}: backend 'cutile' was asked for, but "
        assert_reason(str(raised.value).removeprefix(start), words)
    assert messages(told) == []
    lines, [reason, *others] = info.information()
    assert_reason(reason, words)
    shown = [line for line in lines if reason in line]
    assert shown == [f"    cutile refuses: {reason}", f"wrong: {reason}"] and {*others} <= {reason}
    assert all(f"  {op}: reference" in lines for op in NORMS)
    for form in map(CALLS.get, FEW):
        tensors = tensors_of(form, 5, 32)
        expected = step(form, tensors, backend="reference")
        assert same(step(form, tensors), expected)
    x, w = random(5, N), random(N, seed=1)
    tilenorm.rms_norm_add_rms_norm(x, x, (N,), w, w)
    [message] = messages(told)
    assert_reason(message.removeprefix("tilenorm: reference runs instead of cutile: "), words)
    assert compiler.runs("row_forward") == 0


# A version that nobody can read is no reason to refuse.
SERVE = {"13.4.0": True, "13.10.1": True, "": True, "13.3.36": False, "12.9.1": False}


@pytest.mark.parametrize("version, serves", SERVE.items())
def test_versions(version, serves, compiler, told, monkeypatch):
    is_searched(compiler, monkeypatch)
    compiler.is_of(version)
    for function in (norm, partial(tilenorm.layer_norm, random(5, N), (N,))) * 2:
        if serves:
            function(backend="cutile")
        else:
            with pytest.raises(RuntimeError, match=f"is tileiras {version}; the kernels need 13.4"):
                function(backend="cutile")
    assert compiler.runs("row_forward") == (2 if serves else 0)
    assert compiler.runs("--version") == 1


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_packages_see_one_of_the_variables(variable, compiler, monkeypatch):
    """The remedy: cuTile hides the two others from the tileiras of the packages."""
    is_searched(compiler, monkeypatch)
    toolkit(variable, compiler, monkeypatch)
    monkeypatch.setattr(_compile, "_find_pip_tileiras", lambda: str(compiler.path))
    if variable == "CUDA_ROOT":
        with pytest.raises(RuntimeError, match=r"unset CUDA_ROOT$"):
            norm(backend="cutile")
    else:
        norm(backend="cutile")


def test_a_kernel_that_fails_with_the_right_toolkit(compiler, told, monkeypatch):
    """A variable that names a toolkit is no fault: the kernel is."""
    is_searched(compiler, monkeypatch)
    monkeypatch.setenv("CUDA_HOME", str(compiler.folder))
    compiler.breaks(row_forward=ERROR)
    norm()
    tilenorm.layer_norm(random(5, N), (N,))
    named = "its kernel row_forward does not compile for sm_90: "
    assert [named in message for message in messages(told)] == [True, True]


def test_another_release_of_the_toolkit_may_serve(compiler, told, monkeypatch):
    is_searched(compiler, monkeypatch)
    toolkit("CUDA_HOME", compiler, monkeypatch)
    compiler.breaks()
    norm(backend="cutile")
    compiler.breaks(norm_backward=ERROR)  # until a kernel fails
    x = random(5, N).requires_grad_()
    tilenorm.rms_norm(x, (N,)).sum().backward()
    [message] = messages(told)
    assert message.endswith(toolchain.toolkit_problem())


def test_packages_of_different_releases_are_named(compiler, monkeypatch):
    is_searched(compiler, monkeypatch)
    compiler.path.unlink()
    versions = dict(zip(toolchain.COMPILER_PACKAGES, ("13.4.92", "13.2.86", None), strict=True))
    monkeypatch.setattr(toolchain, "package_version", versions.get)
    found = "nvidia-cuda-tileiras 13.4.92, nvidia-cuda-nvcc 13.2.86, nvidia-nvvm None;"
    assert found in toolchain.compiler_problem()
