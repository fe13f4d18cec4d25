"""Kernels are launched by cuTile's own function, whatever has replaced cuda.tile.launch.

A call that repeats an earlier one gives the driver the arguments that cuTile would give it.
"""

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch
from cuda.tile._cext import default_tile_context

from tests.support import stand_in_driver
from tests.support.calls import slow
from tests.support.executors import backward_calls, forward_calls
from tilenorm.launch import driver, toolchain
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.driver import Argument, Prepared, arguments_of, repeating
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec, Quantization
from tilenorm.tools.cubin import attributes, sections
from tilenorm.tools.precompile import signature

TARGET, CAPABILITY = Target.of("sm_90"), (9, 0)
SPECS = {
    "rms": NormSpec("rms", 1024, "bfloat16", "bfloat16"),
    "narrow": NormSpec("rms", 64, "bfloat16", "bfloat16", "bfloat16"),
    "layer": NormSpec("layer", 1000, "float32", "float32", "float32"),
    "add": NormSpec("rms", 1024, "bfloat16", "bfloat16", residual="float32"),
    "heads": NormSpec("rms", 128, "bfloat16", "bfloat16", heads=4),
    "blocks share a row": NormSpec("layer", 65536, "float16", "float16", "float16"),
    "quantized": NormSpec(
        "rms", 1024, "bfloat16", "bfloat16", quantized=Quantization("row", "float8_e4m3fn")
    ),
}
PARAMETER = 0x17  # EIATTR_KPARAM_INFO: index, (ordinal, offset), and in 14 bits at 18 the size


def taken(cubin: bytes) -> list[int]:
    """The sizes of the arguments that a compiled kernel takes."""
    [info] = [data for name, _, data in sections(cubin) if name.startswith(".nv.info.")]
    found = [struct.unpack("<4xIxxH", data) for kind, data in attributes(info) if kind == PARAMETER]
    return [flags >> 2 for _, flags in sorted(found, key=lambda each: each[0] & 0xFFFF)]


def calls(spec):
    found = forward_calls(spec, TARGET, 64, True)
    return (
        found if spec.quantized else found + backward_calls(spec, TARGET, 64, every_gradient(spec))
    )


@pytest.mark.parametrize("name", ["narrow", "quantized", *slow("blocks share a row")])
def test_compiled_kernels_take_arguments_of_these_sizes(name):
    for call in calls(SPECS[name]):
        made = signature(call.kernel, call.arguments)
        cubin, *_ = call.kernel._compile(made, default_tile_context, CAPABILITY)
        places = numbered(call.arguments, tensors := [])
        found = list(arguments_of(made, call.arguments, places))
        assert [a.size for a in found] == taken(cubin)
        assert len({a.place for a in found} - {None}) == len(tensors)


def numbered(value, tensors: list):
    """The arguments, with numbers in the places of the tensors."""
    if isinstance(value, tuple):
        return tuple([numbered(item, tensors) for item in value])
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return len(tensors) - 1
    return value


class Queue:
    """The driver's cuLaunchKernelEx: reads what it is given."""

    def __init__(self, sizes: dict[int, list[int]], code: int = 0):
        self.sizes, self.code, self.seen = sizes, code, []

    def __call__(self, config: int, function: int, arguments: int, _) -> int:
        config = driver._Config.from_address(config)
        sizes = self.sizes[function]
        places = (ctypes.c_void_p * len(sizes)).from_address(arguments)
        read = [
            int.from_bytes(ctypes.string_at(*at), "little")
            for at in zip(places, sizes, strict=True)
        ]
        self.seen.append((function, config.stream, read))
        return self.code


LAUNCHES = (
    Prepared(11, (7,), (Argument(8, place=2), Argument(4, 5), Argument(8, place=0)), False),
    Prepared(12, (2, 3), (Argument(8, place=2), Argument(8, place=1), Argument(4, 9)), True),
)
SIZES = {launch.function: [a.size for a in launch.arguments] for launch in LAUNCHES}


def test_a_thread_without_a_context_gets_it_and_launches_again():
    queue, entered = Queue(SIZES, code=201), []

    def enter():
        entered.append(queue.code)
        queue.code = 0
        return len(entered) == 1

    repeat = repeating(queue, LAUNCHES, 3, enter)
    assert repeat(1, [0, 0, 0]) and entered == [201]
    assert [seen[0] for seen in queue.seen] == [11, 11, 12]
    queue.code = 400  # ends the call
    assert not repeat(1, [0, 0, 0]) and entered == [201, 400]
    assert [seen[0] for seen in queue.seen[3:]] == [11]


def test_the_context_of_a_thread_is_the_devices_if_it_has_none(monkeypatch):
    class Contexts:
        def __init__(self):
            self.current, self.retained = None, []

        def cuCtxGetCurrent(self, found):
            found._obj.value = self.current
            return 0

        def cuDevicePrimaryCtxRetain(self, found, index):
            self.retained.append(index)
            found._obj.value = 40 + index
            return 0

        def cuCtxSetCurrent(self, context):
            self.current = context
            return 0

    contexts = Contexts()
    monkeypatch.setattr(driver, "_driver", lambda: contexts)
    driver._primary.cache_clear()
    assert driver._enter(1) and contexts.current == 41
    assert not driver._enter(0) and contexts.current == 41 and contexts.retained == [1]
    contexts.current = None
    assert driver._enter(1) and contexts.retained == [1]
    driver._primary.cache_clear()


def test_calls_beside_each_other_have_arguments_of_their_own():
    """A call inside of another stands for a call by another thread."""
    queue = Queue(SIZES)

    def nested(*given):
        if not queue.seen:
            queue.seen.append("first")
            assert repeat(2, [21, 22, 23])
        return queue(*given)

    repeat = repeating(nested, LAUNCHES, 3)
    assert repeat(1, [11 << 40, 12 << 40, 13 << 40])
    a, b, c = (each << 40 for each in (11, 12, 13))
    read = [(stream, arguments) for _, stream, arguments in queue.seen[1:]]
    assert read == [(2, [23, 5, 21]), (2, [23, 22, 9]), (1, [c, 5, a]), (1, [c, b, 9])]


class Driver(SimpleNamespace):
    """A driver with one kernel, whose arguments have the sizes `takes`."""

    def __init__(self, takes: list[int], capturing: int = 0):
        super().__init__(takes=takes, capturing=capturing, cuLaunchKernelEx=lambda *_: 0)

    def cuStreamIsCapturing(self, stream, status):
        status._obj.value = self.capturing
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size):
        if index >= len(self.takes):
            return 1
        size._obj.value = self.takes[index]
        return 0


@pytest.fixture
def prepared(monkeypatch):
    """What driver.prepare returns for the first launch of an RMSNorm by a driver."""
    [call] = forward_calls(SPECS["rms"], TARGET, 64, True)
    made = signature(call.kernel, call.arguments)
    monkeypatch.setattr(driver.KernelSignature, "from_kernel_args", lambda *_: made)
    monkeypatch.setattr(driver, "_context", lambda: 1)
    monkeypatch.setattr(driver, "_function", lambda *_: 7)
    monkeypatch.setattr(type(call.kernel), "_compile", lambda *_: (b"", made.symbol, None, ()))
    start, arrays, after = call.arguments[:2], call.arguments[2], call.arguments[3:]
    launch = driver.Launch(call.kernel, call.grid, start, tuple, after)
    sizes = [a.size for a in arguments_of(made, call.arguments, call.arguments)]

    def prepare(takes=sizes, capturing=0):
        monkeypatch.setattr(driver, "_driver", lambda: Driver(takes, capturing))
        places = numbered(arrays, tensors := [])
        return driver.prepare(0, 3, [launch], arrays, places, len(tensors))

    prepare.sizes = sizes
    return prepare


def test_nothing_is_prepared_while_the_stream_is_captured(prepared):
    assert prepared(capturing=1) is None
    assert prepared()(1, [0] * 4) is True


def test_a_kernel_that_takes_other_arguments_is_launched_by_cutile(prepared):
    for sizes in (prepared.sizes[:-1], [*prepared.sizes, 4], [4, 4, 4, *prepared.sizes[3:]]):
        repeat = prepared(sizes)
        assert repeat is driver.never and not repeat(0, [])


# Each kernel of a training step is launched by cuTile, and repeated by Python and by the extension
# in C++, if there is one: the driver gets the same.
# Something replaces cuTile's launch function before it is imported here, and once more after that.
REPEATED = """
import cuda.tile as ct
original = ct.launch
ct.launch = lambda stream, grid, kernel, arguments, /: original(0, (1,), kernel, ())
import pathlib, pytest
from tests.support import stand_in_compiler, stand_in_driver
from tests.support.executors import backward_calls, forward_calls
from tests.launch.test_driver import SPECS, numbered
from tilenorm.launch import driver, kernel
from tilenorm.launch.calls import Launch, every_gradient
from tilenorm.launch.target import Target
from tilenorm.ops.passes.native import build
extension = build.load(pathlib.Path("EXTENSION")) if "EXTENSION" else None
if extension:
    import ctypes, torch
    queue = ctypes.cast(stand_in_driver.queue(), ctypes.c_void_p).value
    extension.start(0, torch.Size, queue, 0, 0)
stand_in_compiler.Compiler(pathlib.Path("FOLDER"), pytest.MonkeyPatch())
ct.launch = patched = lambda *a, **k: 1 / 0
target, seen = Target.of("sm_90"), 0
for name, spec in SPECS.items():
    if spec.quantized or name == "rms":  # NumPy has no string for 8-bit floats; narrow is alike
        continue
    spec = stand_in_driver.in_float16(spec)
    for rows in (3, 1) if name == "layer" else (3,):  # an extent of 1 is a constant
        calls = forward_calls(spec, target, rows, True)
        calls += backward_calls(spec, target, rows, every_gradient(spec))
        for call in calls:
            *before, last = given = stand_in_driver.arrays_of(call.arguments)
            launch = Launch(call.kernel, call.grid, before, lambda last: last, (), call.overlap)
            made = driver.signature_of(call.kernel, given)
            places = numbered(call.arguments, tensors := [])
            arguments = tuple(driver.arguments_of(made, call.arguments, places))
            taking = [a.size for a in arguments]
            kernel.launch(0, [launch], last)  # with a compilation
            assert (repr(made), (9, 0)) in call.kernel._found, "it would be compiled twice"
            expected = stand_in_driver.last_launch(
                taking, lambda: kernel.launch(0, [launch], last)
            )
            prepared = driver.Prepared(1, call.grid, arguments, call.overlap)
            repeat = driver.repeating(stand_in_driver.queue(), [prepared], len(tensors))
            starts = [stand_in_driver.address(t) for t in tensors]
            found = stand_in_driver.last_launch(taking, lambda: repeat(0, starts))
            assert found == expected, (name, rows, call.kernel._pyfunc.__name__)
            assert len(set(starts)) == len(starts)
            if extension:
                anyhow = [*range(len(tensors))]
                how = anyhow, [], [], [], 0, [prepared]
                repeat = extension.repeat(-1, 0, len(tensors), *how)
                here = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tensors]
                found = stand_in_driver.last_launch(taking, lambda: repeat(here))
                lie = dict(zip(starts, [t.data_ptr() for t in here], strict=True))
                expected = [lie.get(word, word) for word in expected]
                assert found == expected, (name, rows, call.kernel._pyfunc.__name__)
            seen += 1
assert seen > 15, seen
assert ct.launch is patched  # what others see stays as they made it
"""


@pytest.mark.slow
def test_a_repeated_launch_gives_the_driver_what_cutile_gives_it(tmp_path, extension_file):
    program = REPEATED.replace("FOLDER", str(tmp_path))
    stand_in_driver.check(program.replace("EXTENSION", str(extension_file or "")), tmp_path)


def test_no_driver(monkeypatch):
    monkeypatch.setattr(toolchain, "DRIVER", "libthere-is-none.so")
    with pytest.raises(OSError, match="libthere-is-none"):
        toolchain.driver_version()
