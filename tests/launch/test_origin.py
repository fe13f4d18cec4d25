"""Kernels are launched by cuTile's own function, whatever has replaced cuda.tile.launch."""

import importlib.util

import pytest

from tests import stand_in_driver
from tilenorm.launch import toolchain

FEWER = "lambda stream, grid, kernel, arguments, /: original(0, (1,), kernel, ())"
OTHER = "lambda *a, **k: original(a[0], (7, 7, 7, 7), *a[2:], **k)"
RAISES = "lambda *a, **k: 1 / 0"
# The program launches a step of rows that blocks share: 2 + 3 kernels, some of which overlap.
PROGRAM = """
import cuda.tile as ct
original = ct.launch
{before}
import pathlib, pytest, tilenorm
from tests import stand_in_compiler, stand_in_driver
stand_in_compiler.Compiler(pathlib.Path({folder!r}), pytest.MonkeyPatch())
for patch in [{after}]:
    patch()
    patched = ct.launch
    assert patched is not original
    before = stand_in_driver.launches()
    stand_in_driver.launch_step(65536)
    assert stand_in_driver.launches() == before + 2 + 3
    assert ct.launch is patched  # what others see stays as they made it
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    stand_in_driver.built(folder)
    return folder


def check(folder, before, *after):
    program = PROGRAM.format(folder=str(folder), before=before, after=", ".join(after))
    done = stand_in_driver.run(program, folder)
    assert done.returncode == 0, done.stderr


def test_patches_of_the_launch_function_before_and_after(folder):
    after = [f"lambda: setattr(ct, 'launch', {patch})" for patch in (FEWER, OTHER, RAISES)]
    check(folder, f"ct.launch = {FEWER}", "lambda: None", *after)


# Each kernel of a training step is launched by cuTile, and repeated: the driver gets the same.
REPEATED = """
import pathlib, pytest
from tests import stand_in_compiler, stand_in_driver
from tests.executors import backward_calls, forward_calls
from tests.launch.test_driver import SPECS, numbered
from tilenorm.launch import driver, kernel
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.target import Target
from dataclasses import replace
stand_in_compiler.Compiler(pathlib.Path({folder!r}), pytest.MonkeyPatch())
target, seen = Target.of("sm_90"), 0
for name, spec in SPECS.items():
    if spec.quantized:  # NumPy's interface has no string for 8-bit floats
        continue
    spec = stand_in_driver.in_float16(spec)
    for rows in (1, 3):  # an extent of 1 is a constant
        calls = forward_calls(spec, target, rows, True)
        calls += backward_calls(spec, target, rows, every_gradient(spec))
        for call in calls:
            given = stand_in_driver.arrays_of(call.arguments)
            how = {{"programmatic_dependent_launch": True}} if call.overlap else {{}}
            made = driver.signature_of(call.kernel, given)
            places = numbered(call.arguments, tensors := [])
            arguments = tuple(driver.arguments_of(made, call.arguments, places))
            taking = [a.size for a in arguments]
            kernel.launch_kernel(0, call.grid, call.kernel, given, **how)  # with a compilation
            assert (repr(made), (9, 0)) in call.kernel._found, "it would be compiled twice"
            expected = stand_in_driver.last_launch(
                taking, lambda: kernel.launch_kernel(0, call.grid, call.kernel, given, **how)
            )
            prepared = driver.Prepared(1, call.grid, arguments, call.overlap)
            repeat = driver.repeating(stand_in_driver.queue(), [prepared], len(tensors))
            starts = [stand_in_driver.address(t) for t in tensors]
            found = stand_in_driver.last_launch(taking, lambda: repeat(0, starts))
            assert found == expected, (name, rows, call.kernel._pyfunc.__name__)
            assert len(set(starts)) == len(starts)
            seen += 1
assert seen > 30, seen
"""


def test_a_repeated_launch_gives_the_driver_what_cutile_gives_it(folder):
    done = stand_in_driver.run(REPEATED.format(folder=str(folder)), folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not importlib.util.find_spec("tilegym"), reason="TileGym is not installed")
@pytest.mark.parametrize("when", ["before", "after"])
def test_tilegym(folder, when):
    if when == "before":
        check(folder, "import tilegym", "lambda: None")
    else:
        check(folder, "", "lambda: __import__('tilegym')")


def test_no_driver(monkeypatch):
    monkeypatch.setattr(toolchain, "DRIVER", "libthere-is-none.so")
    with pytest.raises(OSError, match="libthere-is-none"):
        toolchain.driver_version()
