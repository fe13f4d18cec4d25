"""What a call of a patched class runs: functions that are made for the class.

In a step that waits for the host, each Python frame before tilenorm's function costs time, because
its code has left the CPU's caches. So the source of a patched norm's forward is written for what
its form computes, with the form's constants as literals. In one frame it compares a call with those
that recognition compared, and calls tilenorm's function. It takes 4.7 µs where nine frames took
13.4, and where a forward that compares nothing takes 4.4, module call included (LayerNorm on a
CPU, with other code between the calls). A call that is not plain goes to the form's forward.

Each class has a code object of its own, because TorchDynamo counts recompilations by code object.
"""

import inspect
import keyword
import linecache
import zlib
from collections.abc import Callable
from functools import update_wrapper
from textwrap import indent
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_autocast_enabled, nn  # noqa: F401 (the sources name what they use)

from ...ops import functional  # noqa: F401
from ...ops.pytorch.torch_private import _has_any_global_hook
from .form import Form, form_of, promotes

FILE = "<tilenorm.patch "  # how the file names of all sources begin
SUM = "_tilenorm_sum"  # the attribute of a patched class that holds what sum_of makes
FORWARD = """\
def forward(self, *args, **kwargs):
{plain}    return getattr(type(self), "_tilenorm_forward", cls.forward)(self, *args, **kwargs)
"""
SUM_AND_NORM = """\
def sum_and_norm(self, terms, *, defers=False):
{plain}    return one_pass(self, terms, defers=defers)
"""
IF = """\
    if (
        {conditions}
    ):
        return {call}
"""


def forward_of(cls: type[nn.Module], patched: type[nn.Module], form: Form | None) -> FunctionType:
    """The forward of a patched subclass of cls, with the signature of that of cls. form: what it
    computes; None for a block.

    It asks at each call which class the module has now. Wherever it is stored, it runs the forward
    of cls once the patch is undone.
    """
    names: dict[str, Any] = {"cls": cls}
    plain = ""
    if form is not None:
        for number in sorted(dict(form.calls)):
            call = _Plain(cls, form, number)
            tensors = [f"isinstance({t} := args[{i}], Tensor)" for i, t in enumerate(call.tensors)]
            conditions = ["type(self) is patched", f"len(args) == {number}", "not kwargs", *tensors]
            conditions += [] if form.autocasts else [NO_AUTOCAST]
            plain += call.source(conditions, call.result())
            names |= {"patched": patched, call.dtypes: call.served}
    wrapped: Any = update_wrapper(
        _made(cls, FORWARD.format(plain=plain), names), cls.forward, updated=()
    )
    del wrapped.__wrapped__  # Accelerate would take it for a forward that its hooks replaced
    wrapped.__signature__ = inspect.signature(cls.forward)
    return wrapped


def sum_of(cls: type[nn.Module], patched: type[nn.Module], form: Form) -> FunctionType:
    """What `one_pass` gives with a patched norm, in one frame for a plain sum of two terms."""
    names: dict[str, Any] = {"one_pass": one_pass}
    plain = ""
    if 1 in dict(form.calls) and _has_any_global_hook is not None:
        call = _Plain(cls, form, 1)
        conditions = ["type(self) is patched", "len(terms) == 2", *NO_HOOKS]
        conditions += [
            f"isinstance({t} := terms[{i}], Tensor)" for i, t in enumerate(("x", "residual"))
        ]
        conditions += ["x.shape == residual.shape", "x.dtype == residual.dtype"]
        conditions += ["x.device == residual.device", NO_AUTOCAST]
        plain = call.source(conditions, call.result("add_", "x", "residual") + "[::-1]")
        names |= {"patched": patched, call.dtypes: call.served}
    return _made(cls, SUM_AND_NORM.format(plain=plain), names)


def one_pass(
    norm: Any, terms: tuple[Tensor, ...], *by_group: Tensor, defers: bool = False
) -> tuple[Tensor, Tensor | None]:
    """x, or a + b if there are two terms, and the norm of it. by_group: none; or a scale, and the
    norm is multiplied by 1 + scale; or also a shift, which is added to that. defers: whether to
    leave the norm to the caller, with None in its place, where one pass does not compute both.
    """
    form = form_of(norm)
    result = form.one_pass(norm, terms, by_group) if form else None
    if result is not None:
        return result
    if len(terms) > 1:
        total = terms[0] + terms[1]
        return (total, None) if defers else one_pass(norm, (total,), *by_group)
    y = norm(*terms)
    if by_group:
        y = y * (1 + by_group[0])
    return terms[0], y + by_group[1] if len(by_group) > 1 else y


def is_forward_of_a_patch(function: object) -> bool:
    """Whether forward_of made a function."""
    return getattr(getattr(function, "__code__", None), "co_filename", "").startswith(FILE)


NO_AUTOCAST = "not (is_autocast_enabled() and x.is_cuda)"
# As is_its_forward tells, in no frame of its own.
NO_HOOKS = (
    "not _has_any_global_hook()",
    "not (self._forward_hooks or self._forward_pre_hooks)",
    "not (self._backward_hooks or self._backward_pre_hooks)",
    '"forward" not in self.__dict__',
)


class _Plain(NamedTuple):
    """The plain calls of a form: those that one call of tilenorm's function serves as they are.

    cls: the class before the patch. number: of tensors that the forward takes, 1 or 2.
    """

    cls: type[nn.Module]
    form: Form
    number: int

    @property
    def tensors(self) -> tuple[str, ...]:
        return ("x", "gate")[: self.number]

    @property
    def parameters(self) -> dict[str, str]:
        """By the names of variables: the attributes of the module that hold its parameters."""
        named = {"weight": self.form.weight, "bias": self.form.bias}
        return {variable: name for variable, name in named.items() if name}

    @property
    def dtypes(self) -> str:
        """The name of what `served` gives."""
        return f"dtypes_of_{self.number}"

    @property
    def served(self) -> tuple[tuple[torch.dtype | None, ...], ...]:
        """The dtypes of the tensors and of each parameter that are served and not widened."""
        combinations = []
        for x, gate, parameter in self.form.dtypes:
            widened = (
                self.form.promotes and self.form.weight and parameter and promotes(x, parameter)
            )
            if (gate is not None) == (self.number == 2) and not widened:
                tensors = (x, gate)[: self.number]
                combinations.append(tensors + (parameter,) * len(self.parameters))
        return tuple(sorted(combinations, key=lambda dtypes: len({*dtypes})))

    def source(self, conditions: list[str], result: str) -> str:
        """Returns the result if all conditions hold, and those of a plain call. The form's method
        `served` is the rule.
        """
        form = self.form
        if form.groups or form.channels or not self.served:
            return ""
        conditions = [*conditions, "(shape := x.shape)", self._takes_dims()]
        shapes = [f"shape[-{form.dims} :]", *(f"{name}.shape" for name in self.parameters)]
        if self.number == 2:
            conditions.append("gate.shape == shape")
        for variable, name in self.parameters.items():
            conditions += self._read(variable, name)
        if len(shapes) > 1:
            shapes[1] = f"(sizes := {shapes[1]})"
            conditions.append(" == ".join(shapes))
        else:
            conditions.append(f"(sizes := {shapes[0]})")
            if form.sizes:
                conditions.append(f"shape[-{len(form.sizes)} :] == {form.sizes!r}")
        dtypes = [f"{name}.dtype" for name in (*self.tensors, *self.parameters)]
        dtypes += [""] if len(dtypes) == 1 else []
        conditions.append(f"({', '.join(dtypes)}) in {self.dtypes}")
        if len(self.parameters) == 2:
            conditions.append("weight.device == bias.device")
        return IF.format(conditions="\n        and ".join(conditions), call=result)

    def _takes_dims(self) -> str:
        served = self.form.dims_of(self.number)
        least, most = served[0], served[-1]
        text = f"len(shape) in {tuple(served)!r}"
        if self.number not in self.form.beyond:
            return text
        in_a_row = served == [*range(least, most + 1)]
        return f"len(shape) >= {least}" if in_a_row else f"({text} or len(shape) > {most})"

    def _read(self, variable: str, name: str) -> list[str]:
        """Conditions that read a parameter. A class may say itself what its attributes are. A
        parametrization and FSDP take parameters out of `_parameters`.
        """
        if not reads_parameters(self.cls, name):
            return [f"isinstance({variable} := {attribute(name)}, Tensor)"]
        return [
            f"{name!r} in self._parameters",
            f"({variable} := self._parameters[{name!r}]) is not None",
        ]

    def result(self, kind: str = "", *tensors: str) -> str:
        """The call of tilenorm's function."""
        form, kind = self.form, kind or ("gated_" if self.number == 2 else "")
        weight, bias = (name if name in self.parameters else "None" for name in ("weight", "bias"))
        eps = attribute(form.eps) if isinstance(form.eps, str) else repr(form.eps)
        offset = form.offset
        if form.rounds_offset and form.weight:
            weight, offset = f"{weight} + {offset!r}", 0.0
        arguments = [*(tensors or self.tensors), "sizes", weight]
        arguments += [bias, eps] if form.norm == "layer" else [eps]
        arguments += [f"bias={bias}"] if form.norm == "rms" and form.bias else []
        options: dict[str, tuple[Any, Any]] = {
            "offset": (offset, 0.0),
            "rounding": (form.rounding, "late"),
        }
        if kind == "gated_":
            options["norm_before_gate"] = form.gate == "after", True
            options["activation"] = form.activation, "silu"
        arguments += [
            f"{name}={value!r}" for name, (value, other) in options.items() if value != other
        ]
        return f"functional.{kind}{form.norm}_norm({', '.join(arguments)})"


def reads_parameters(cls: type[nn.Module], name: str) -> bool:
    """Whether an instance's attribute of that name is in `_parameters`, if it is there at all."""
    looks_up: Any = cls
    plainly = looks_up.__getattr__ is nn.Module.__getattr__
    plainly = plainly and cls.__getattribute__ is nn.Module.__getattribute__
    return plainly and not hasattr(cls, name)


def attribute(name: str) -> str:
    """The source that reads an attribute of the module."""
    plain = name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
    return f"self.{name}" if plain else f"getattr(self, {name!r})"


def _made(cls: type[nn.Module], source: str, names: dict[str, Any]) -> Any:
    """The function that a source defines. names: what it uses besides this module's.

    Tracebacks show the source. TorchDynamo tells the functions of classes apart by their files.
    """
    source = f"def make({', '.join(names)}):\n{indent(source, '    ')}"
    name, *_ = source.partition("def ")[2].partition("def ")[2].partition("(")
    source += f"    return {name}\n"
    file = f"{FILE}{cls.__module__}.{cls.__qualname__} {zlib.crc32(source.encode()):08x}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    functions: dict[str, Callable] = {}
    exec(compile(source, file, "exec", dont_inherit=True), globals(), functions)
    return functions["make"](**names)
