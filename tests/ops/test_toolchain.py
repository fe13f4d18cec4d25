"""A compiler that cannot serve: one message with the remedy, from calls and from info."""

from functools import partial
from itertools import product

import pytest
from cuda.tile import _compile

import tilenorm
from tests.stand_in_compiler import ERROR, has_ptxas
from tilenorm.launch import toolchain
from tilenorm.table import NORMS
from tilenorm.tools import info

from .helpers import FAMILY, incoming_of, messages, random, same, step, tensors_of

pytestmark = pytest.mark.usefixtures("no_memory")

N = 64
SEARCH = _compile._find_compiler_bin.__wrapped__
VARIABLES = ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH")


def norm(**options):
    return tilenorm.rms_norm(random(5, N), (N,), random(N, seed=1), **options)


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


# What is wrong, what the message says of it, and how often a kernel is compiled in vain.
USES = "{path} (tileiras 13.4.92) fails: it uses ptxas and libnvvm of "
BROKEN = {
    "absent": (lambda c, _: c.path.unlink(), "tileiras is missing (nvidia-cuda-tileiras ", 0),
    "does not run": (unrunnable, "{path} does not run: ", 0),
    "13.2": (lambda c, _: c.is_of("13.2.86"), "{path} is tileiras 13.2.86; the kernels need", 0),
    "alone": (alone, USES + "{folder}, where ptxas is missing, and needs", 1),
} | {
    name: (
        partial(toolkit, name),
        USES + name + "={folder}/old, where ptxas is 13.2.86, and needs those of its own release: "
        "unset " + name,
        1,
    )
    for name in VARIABLES
}


@pytest.fixture(params=BROKEN)
def broken(request, compiler, monkeypatch) -> tuple:
    """The compiler, in which something is wrong, what is said of it, and the failures it costs."""
    does, words, runs = BROKEN[request.param]
    is_searched(compiler, monkeypatch)
    does(compiler, monkeypatch)
    return compiler, words.format(path=compiler.path, folder=compiler.folder), runs


def assert_reason(reason: str, words: str) -> None:
    """It is one line, and ends in what a user can do."""
    assert reason.startswith(f"its compiler {words}") and "\n" not in reason
    packages = (f'"{name}>=13.4,<13.5"' for name in toolchain.COMPILER_PACKAGES)
    pip = f"pip install {' '.join(packages)}"
    # The packages' tileiras sees CUDA_ROOT too.
    assert reason.endswith("unset CUDA_ROOT" if "CUDA_ROOT" in reason else pip)


def test_one_warning_for_every_spec(broken, told):
    compiler, words, runs = broken
    for name, hidden in product(FAMILY, (N, 32)):
        form = FAMILY[name]
        tensors = tensors_of(form, 5, hidden)
        incoming = incoming_of(tensors)
        expected = step(form, tensors, incoming, backend="reference")
        assert same(step(form, tensors, incoming), expected)
    x, w = random(5, N), random(N, seed=1)
    tilenorm.rms_norm_add_rms_norm(x, x, (N,), w, w)
    [message] = messages(told)
    start = "tilenorm: reference runs instead of cutile: "
    assert_reason(message.removeprefix(start), words)
    assert compiler.runs("row_forward") == runs


def test_a_backend_that_was_asked_for_raises_the_same(broken, told):
    compiler, words, runs = broken
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            norm(backend="cutile")
        start = "rms_norm: backend 'cutile' was asked for, but "
        assert_reason(str(raised.value).removeprefix(start), words)
    with pytest.raises(
        RuntimeError, match=r"^layer_norm: backend 'cutile' was asked for, but its compiler "
    ):
        tilenorm.layer_norm(random(5, N), (N,), backend="cutile")
    assert messages(told) == []
    assert compiler.runs("row_forward") == runs


def test_info_says_it_once(broken, gpu_of_info):
    compiler, words, runs = broken
    lines, wrong = info.information()
    assert len(set(wrong)) == 1
    assert_reason(wrong[0], words)
    assert [line for line in lines if wrong[0] in line] == [
        f"    cutile refuses: {wrong[0]}",
        f"wrong: {wrong[0]}",
    ]
    assert all(f"  {op}: reference" in lines for op in NORMS)
    assert compiler.runs("row_forward") == runs


# A version that nobody can read is no reason to refuse.
SERVE = dict.fromkeys(("13.4.0", "13.5.37", "13.10.1", "14.0.1", ""), True)
SERVE |= dict.fromkeys(("13.3.36", "13.1.80", "12.9.1"), False)


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
