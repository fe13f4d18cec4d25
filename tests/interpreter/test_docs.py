"""The interpreter runs the examples in cuda.tile's docstrings and prints their expected output."""

import builtins
import doctest
import inspect
import re
import textwrap

import cuda.tile as ct
import pytest
import torch
from cuda.tile._execution import is_stub

from tests import interpreter
from tests.interpreter.dispatch import TABLE
from tests.interpreter.launching import HOST_STUBS

EXAMPLE = re.compile(
    r"^( *)\.\. (testcode|testoutput)::\n((?:\1 +:.*\n)*)((?:\1 +.*\n|\s*\n)+)", re.M
)
NOT_IMPLEMENTED = {
    "arange-0",  # start and step
    "load-1",  # order
    "load-2",  # padding with NaN
}


def is_served(stub) -> bool:
    return stub in TABLE or stub in HOST_STUBS or not is_stub(stub)


def examples():
    """A pytest parameter for each example of the operations that are implemented.

    Its code, whether it is the body of a kernel, the expected output, and a doctest flag.
    """
    for name in ct.__all__:
        if not is_stub(getattr(ct, name)):
            continue
        found = EXAMPLE.findall(textwrap.dedent(inspect.getdoc(getattr(ct, name)) or "") + "\n")
        for i, (_, kind, options, body) in enumerate(found):
            names = re.findall(r"\bct\.(\w+)", body)
            if kind != "testcode" or not all(is_served(getattr(ct, n)) for n in (name, *names)):
                continue
            _, kind, flags, expected = found[i + 1] if i + 1 < len(found) else ("", "", "", "")
            if kind != "testoutput":
                flags = expected = ""
            expected = textwrap.dedent(expected).strip("\n") + "\n"
            wrap, normalize = "kernel_wrapper.py" in options, "NORMALIZE_WHITESPACE" in flags
            if (label := f"{name}-{i // 2}") not in NOT_IMPLEMENTED:
                yield pytest.param(textwrap.dedent(body), wrap, expected, normalize, id=label)


@pytest.mark.parametrize("code, wrap, expected, normalize", list(examples()))
def test_docstring_example(code, wrap, expected, normalize, monkeypatch, capsys):
    def launch(stream, grid, kernel, args):
        interpreter.launch(grid, kernel, args)

    monkeypatch.setattr(ct, "launch", launch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    code = code.replace("cuda:0", "cpu")
    if wrap:
        code = "@ct.kernel\ndef kernel():\n" + textwrap.indent(code, "    ")
        code += "\nct.launch(stream, (1,), kernel, ())\n"
    # A namespace of its own: the interpreter replaces names in a kernel's module.
    namespace = {"ct": ct, "torch": torch, "stream": None, "__builtins__": builtins}
    exec(code, namespace | {"__name__": "example"})
    options = doctest.NORMALIZE_WHITESPACE if normalize else 0
    printed = capsys.readouterr().out
    assert doctest.OutputChecker().check_output(expected, printed or "\n", options), printed


def test_examples_are_found():
    assert len(list(examples())) > 50
