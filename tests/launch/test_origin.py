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
