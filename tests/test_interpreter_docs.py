"""The interpreter runs the examples in cuda.tile's docstrings and prints their expected output."""

import builtins
import doctest
import inspect
import re
import textwrap

import cuda.tile as ct
import pytest
import torch
from cuda.tile import _stub
from cuda.tile._execution import is_stub

from tests import interpreter
from tests.interpreter.run import is_supported

UNSUPPORTED = {
    "mma_scaled": "float4 and block scales have no use in a normalisation kernel",
}
_BLOCK = re.compile(
    r"^( *)\.\. (testcode|testoutput)::\n((?:\1 +:.*\n)*)((?:\1 +.*\n|\s*\n)+)", re.M
)


def _documented():
    """Every object of the public API that has a docstring, by name."""
    objects = {"kernel.replace_hints": ct.kernel.replace_hints}
    classes = {"": ct, "RawArrayMemory.": _stub.RawArrayMemory}
    for name in ("Array", "Tile", "TiledView"):
        classes[f"{name}."] = getattr(ct, name)
    for prefix, owner in classes.items():
        for name, value in sorted(vars(owner).items()):
            if isinstance(value, property):
                value = value.fget
            if getattr(value, "__module__", "") == "cuda.tile._stub":
                objects[prefix + name] = value
    return objects


def _examples():
    """A pytest parameter for each example: code, wrap it in a kernel, expected output, flags."""
    for name, value in _documented().items():
        blocks = _BLOCK.findall(textwrap.dedent(inspect.getdoc(value) or "") + "\n")
        for i, (_, kind, options, body) in enumerate(blocks):
            if kind != "testcode":
                continue
            output = blocks[i + 1] if i + 1 < len(blocks) else ("", "testcode", "", "")
            expected, flags = ("", "") if output[1] == "testcode" else (output[3], output[2])
            marks = [pytest.mark.skip(UNSUPPORTED[name])] if name in UNSUPPORTED else []
            yield pytest.param(
                textwrap.dedent(body),
                "kernel_wrapper.py" in options,
                textwrap.dedent(expected).strip("\n") + "\n",
                flags,
                id=f"{name}-{i // 2}",
                marks=marks,
            )


def _launch(stream, grid, kernel, args, **kwargs):
    interpreter.launch(grid, kernel, args)


@pytest.mark.parametrize("code, wrap, expected, flags", list(_examples()))
def test_docstring_example(code, wrap, expected, flags, monkeypatch, capsys):
    monkeypatch.setattr(ct, "launch", _launch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    code = code.replace("cuda:0", "cpu")
    if wrap:
        code = "@ct.kernel\ndef kernel():\n" + textwrap.indent(code, "    ")
        code += "\nct.launch(stream, (1,), kernel, ())\n"
    # A namespace of its own: the interpreter replaces names in a kernel's module.
    namespace = {"ct": ct, "torch": torch, "stream": None, "__builtins__": builtins}
    namespace["__name__"] = "example"
    if expected.startswith("Traceback"):
        expected_error = expected.strip().splitlines()[-1].split(":")[0]
        with pytest.raises(Exception) as failure:
            exec(code, namespace)
        assert failure.type.__name__.removeprefix("Tile") == expected_error
        return
    exec(code, namespace)
    options = doctest.NORMALIZE_WHITESPACE if "NORMALIZE_WHITESPACE" in flags else 0
    printed = capsys.readouterr().out
    assert doctest.OutputChecker().check_output(expected, printed or "\n", options), printed


def test_examples_are_found():
    assert len(list(_examples())) > 100


def test_every_operation_is_supported():
    operations = {name for name in ct.__all__ if is_stub(getattr(ct, name))}
    missing = {name for name in operations if not is_supported(getattr(ct, name))}
    # foreign_pointer_dtype is a host function. Kernels do not call it.
    assert missing - {"foreign_pointer_dtype"} == set(UNSUPPORTED)
