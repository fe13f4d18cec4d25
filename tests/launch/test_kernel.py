"""A kernel compiles once, in bounded time, whatever threads, the cache and the compiler do; and a
kernel that an earlier process compiled is found without tracing, if nothing has changed.
"""

import os
import pickle
import signal
import threading
import time
from functools import partial

import cuda.tile as ct
import pytest
from cuda.tile._cext import default_tile_context

from tests.ops.test_memory import at_once
from tests.support.calls import slow
from tests.support.executors import forward_calls
from tests.support.stand_in_compiler import CRASH
from tilenorm.kernels.forward import row_forward
from tilenorm.launch import disk_cache
from tilenorm.launch.config import Hints
from tilenorm.launch.kernel import TIMEOUT, CompileError, Kernel, bounded, hinted
from tilenorm.launch.target import Target
from tilenorm.launch.toolchain import cache_problem
from tilenorm.spec import NormSpec
from tilenorm.tools.precompile import precompile, signature

SPEC = NormSpec("rms", 64, "bfloat16", "bfloat16")
TARGET, CAPABILITY = Target.of("sm_90"), (9, 0)
THREADS = 8
ROWS_OF_16 = 16  # another signature than that of 1000 rows


def signature_of(rows=1000, spec=SPEC):
    """That of the forward kernel."""
    [call] = forward_calls(spec, TARGET, rows, True)
    return signature(call.kernel, call.arguments)


def compiled(kernel=None, rows=1000, capability=CAPABILITY):
    """What a launch of the forward kernel gets; of a new kernel, as in a new process."""
    kernel = kernel or Kernel(row_forward._pyfunc)
    return kernel._compile(signature_of(rows), default_tile_context, capability)


@pytest.mark.parametrize("folder", ["cache", *slow("off")])
def test_threads_share_one_compilation_and_one_failure(folder, compiler, monkeypatch):
    if folder == "off":
        monkeypatch.setattr(default_tile_context.config, "cache_dir", None)
    compiler.breaks(row_forward='sleep 0.3; echo cubin > "$3"; exit')
    found = at_once([partial(compiled, Kernel(row_forward._pyfunc))] * THREADS)
    assert len({id(result) for result in found}) == 1
    assert found[0][0] == b"cubin\n"
    compiler.breaks(row_forward=f"sleep 0.3; {CRASH}")
    kernel = Kernel(row_forward._pyfunc)
    found = at_once([partial(compiled, kernel, ROWS_OF_16)] * THREADS)
    assert all(type(error) is CompileError for error in found)
    assert len(set(map(str, found))) == 1
    assert compiler.runs("row_forward") == 2


def test_threads_share_one_kernel(compiler, monkeypatch):
    """cuTile may crash after the destruction of a kernel that was launched."""
    made, begin = [], Kernel.__init__

    def slowly(self, *args, **kwargs):
        made.append(self)
        threading.Event().wait(0.1)
        begin(self, *args, **kwargs)

    monkeypatch.setattr(Kernel, "__init__", slowly)
    found = at_once([partial(hinted, row_forward, Hints(occupancy=3))] * THREADS)
    assert len(set(found)) == 1
    assert len(made) > 1  # the test was about a race
    assert hinted(row_forward, Hints(occupancy=3)) is found[0]


def test_devices_of_two_architectures_each_have_their_code(compiler):
    kernel = Kernel(row_forward._pyfunc)
    compiled(kernel)
    compiled(kernel, capability=(10, 0))
    assert compiler.runs("row_forward") == 2


def test_a_failure_is_told_in_one_line_and_not_tried_again(compiler):
    compiler.breaks(row_forward="printf 'error: one\\nmore\\n' >&2; exit 7")
    kernel = Kernel(row_forward._pyfunc)
    message = "its kernel row_forward does not compile for sm_90: Return code 7 one more"
    for _ in range(2):
        with pytest.raises(CompileError) as raised:
            compiled(kernel)
        assert str(raised.value) == message
    assert str(pickle.loads(pickle.dumps(raised.value))) == message  # from precompile's processes
    assert compiler.runs("row_forward") == 1
    compiler.breaks()
    compiled(kernel, ROWS_OF_16)
    assert compiler.runs("row_forward") == 2


def test_a_failure_is_not_kept_for_later_processes(compiler):
    compiler.breaks(row_forward='echo half > "$3"; kill -KILL $$')
    with pytest.raises(CompileError, match="Return code"):
        compiled()
    compiler.breaks()
    assert compiled()[0] == b"cubin\n"


@pytest.mark.parametrize("given, used", [(None, TIMEOUT), (7.0, 7.0)])
def test_the_time_limit(given, used, monkeypatch):
    config = default_tile_context.config
    monkeypatch.setattr(config, "compiler_timeout_sec", given)
    assert bounded(default_tile_context).config.compiler_timeout_sec == used
    assert default_tile_context.config is config  # other users of cuTile see no change
    assert config.compiler_timeout_sec == given


# How a folder comes to keep nothing, the folder, and what is told of it before it is used.
FOLDERS = {
    "cannot be made": (
        lambda folder, patch: (folder / "file").touch(),
        "{}/file/cache",
        "cannot be written ([Errno 20] Not a directory",
    ),
    # cuTile's folder where there is no home folder; it would be in the working directory.
    "no home": (
        lambda folder, patch: patch.chdir(folder),
        "~/.cache/cutile-python",
        "cannot be written (there is no home folder",
    ),
    # As the superuser sees a read-only file system: files cannot be made.
    "read-only": (
        lambda folder, patch: (folder / "cache" / "cache.db").mkdir(parents=True),
        "{}/cache",
        None,
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_cache_that_keeps_nothing(kind, compiler, monkeypatch):
    prepare, folder, told = FOLDERS[kind]
    prepare(compiler.folder, monkeypatch)
    monkeypatch.setattr(default_tile_context.config, "cache_dir", folder.format(compiler.folder))
    for runs in (1, 2):
        assert compiled()[0] == b"cubin\n"
        assert compiler.runs("row_forward") == runs
    assert not (compiler.folder / "~").exists()
    if told:
        assert told in cache_problem()
        with pytest.raises(RuntimeError, match="nothing would be kept"):
            next(precompile([SPEC], TARGET))


def test_a_process_that_was_killed_while_it_compiled(compiler):
    compiler.breaks(row_forward="exec sleep 5")
    if (child := os.fork()) == 0:
        compiled()
        os._exit(0)
    while not compiler.runs("row_forward"):
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    compiler.breaks()
    assert compiled()[0] == b"cubin\n"
    assert compiler.runs("row_forward") == 2
    compiled()
    assert compiler.runs("row_forward") == 2


@pytest.fixture
def traced(monkeypatch, tmp_path):
    """A list of the signatures that cuTile itself compiles. The cache starts empty."""
    for name in [name for name in os.environ if name.startswith("CUDA_TILE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(default_tile_context.config, "cache_dir", str(tmp_path))
    disk_cache._origin.cache_clear()
    calls = []

    def compile(self, signature, context, compute_capability=None):
        calls.append(signature)
        return f"cubin {len(calls)}".encode(), "symbol", None, ()

    monkeypatch.setattr(ct.kernel, "_compile", compile)
    yield calls
    disk_cache._origin.cache_clear()


def cubin_of(made=None, capability=CAPABILITY, **hints) -> bytes:
    """The cubin that a new kernel object gets, as in a new process."""
    kernel, made = Kernel(row_forward._pyfunc, **hints), made or signature_of()
    cubin, _, *rest = kernel._compile(made, default_tile_context, capability)
    assert rest == [None, ()]
    return cubin


def test_a_kernel_is_traced_once(traced):
    assert [cubin_of(), cubin_of()] == [b"cubin 1"] * 2
    # A launch asks with a signature without a symbol, precompile with one that has a symbol.
    assert cubin_of(signature_of().with_symbol(None)) == b"cubin 1"
    assert len(traced) == 1


def test_anything_that_changes_the_code_compiles_anew(traced, monkeypatch, tmp_path):
    found = [
        cubin_of(),
        cubin_of(signature_of(spec=NormSpec("rms", 64, "float16", "bfloat16"))),
        cubin_of(capability=(10, 0)),
        cubin_of(occupancy=2),
        cubin_of(num_worker_warps=8),
    ]
    (tmp_path / "tileiras").write_text("")
    (tmp_path / "forward.py").write_text("# edited")
    for owner, name, value in (
        (disk_cache, "compiler_path", lambda: str(tmp_path / "tileiras")),
        (disk_cache.kernels, "__file__", str(tmp_path / "__init__.py")),
        (ct, "__version__", "99"),
    ):
        monkeypatch.setattr(owner, name, value)
        disk_cache._origin.cache_clear()
        found.append(cubin_of())
    assert found == [f"cubin {i}".encode() for i in range(1, 9)]


@pytest.mark.parametrize("name", ["CUDA_TILE_LOGS", "CUDA_TILE_ANYTHING", ""])
def test_other_cutile_variables_turn_the_lookup_off_and_so_does_no_cache(traced, monkeypatch, name):
    if name:
        monkeypatch.setenv(name, "1")
    else:
        monkeypatch.setattr(default_tile_context.config, "cache_dir", None)
    assert [cubin_of(), cubin_of()] == [b"cubin 1", b"cubin 2"]


def test_a_damaged_cache_is_not_an_error(traced, tmp_path):
    cubin_of()
    (tmp_path / "cache.db").write_bytes(b"damaged")
    assert [cubin_of(), cubin_of()] == [b"cubin 2"] * 2
