"""Where the tests run plans: in the interpreter on CPU tensors, or on the current GPU."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tests import interpreter
from tilenorm.launch.calls import Call, Launch, Needs, bound, every_gradient, groups
from tilenorm.launch.config import StreamForward
from tilenorm.launch.plan import plan_backward, plan_forward
from tilenorm.launch.target import Target
from tilenorm.launch.tiling import CLEAR_SLOTS
from tilenorm.ops.passes import cutile
from tilenorm.spec import NormSpec
from tilenorm.table import MODULATION, OPS
from tilenorm.tools.precompile import calls_of, compile_call

from . import cases, oracle
from .guarded import guarded

EPS = 1e-6
SUMS = ("dw", "db", "dkey_weight")
WITH_ROWS = ("x", "residual", "gate", "dy", "dsum", "addend", "skip", "dropout_mask")  # of Inputs


@dataclass(frozen=True)
class Inputs(oracle.Arguments):
    """The inputs of a norm.

    The backward pass gets mean and rstd from the oracle: errors of the forward pass do not matter.
    """

    scale: Tensor | None = None  # of a quantised norm whose caller gives one
    statistics: tuple[Tensor | None, Tensor] | None = None  # in place of the oracle's

    @classmethod
    def random(
        cls, spec: NormSpec, rows: int, device: str, seed: int = 0, groups: int = 1
    ) -> "Inputs":
        """Random inputs with `rows` rows, rounded up to whole tokens if there are heads.

        groups: in which modulated rows lie.
        """
        generator = torch.Generator().manual_seed(seed)

        def normal(dtype: str | None, *shape: int) -> Tensor | None:
            if dtype is None:
                return None
            values = torch.randn(shape, generator=generator)
            return values.to(getattr(torch, dtype)).to(device)

        heads = (spec.heads,) if spec.heads else ()
        lead = (-(-rows // spec.heads), spec.heads) if spec.heads else (rows,)
        return cls(
            x=normal(spec.dtype, *lead, spec.hidden),
            residual=normal(spec.residual, *lead, spec.hidden),
            gate=normal(spec.gate, *lead, spec.hidden),
            weight=normal(spec.weight, *heads, spec.hidden),
            bias=normal(spec.bias, *heads, spec.hidden),
            dy=normal(spec.y_dtype, *lead, spec.hidden),
            dsum=normal(spec.residual, *lead, spec.hidden),
            addend=normal(spec.addend, *lead, spec.hidden),
            skip=normal(spec.skip, *lead, spec.hidden),
            dropout_mask=normal("float32", *lead, spec.hidden) > -1 if spec.dropout_mask else None,
            layer_scale=normal(spec.layer_scale, spec.hidden),
            **{role: normal(getattr(spec, role), groups, spec.hidden) for role in MODULATION},
            scale=cls.given(spec, device),
        )

    @staticmethod
    def given(spec: NormSpec, device: str) -> Tensor | None:
        """The scale that the caller of a quantised norm gives, if it is to give one."""
        asked = spec.quantized is not None and spec.quantized.scaling == "tensor"
        return torch.tensor([0.0123], device=device) if asked else None

    def with_rows(self, change: Callable[[str, Tensor], Tensor]) -> "Inputs":
        """The same with change(name, tensor) for each tensor that has rows."""
        there = {n: t for n in WITH_ROWS if (t := getattr(self, n)) is not None}
        return replace(self, **{name: change(name, t) for name, t in there.items()})

    def tensors(self, spec: NormSpec) -> tuple[Tensor | None, ...]:
        """What a call of the spec's op takes."""
        given = vars(self) | {"given_scale": self.scale}
        return tuple(given[role] for role in OPS[spec.op].roles)

    def saved(self, spec: NormSpec) -> tuple[Tensor, ...]:
        """What a backward pass reads of the forward pass, with the oracle's statistics."""
        mean, rstd = self.stats(spec)
        found = {"x": oracle.total(spec, self), "mean": mean, "rstd": rstd}
        found["input"] = self.x
        return tuple(found.get(role, getattr(self, role, None)) for role in spec.kernel_reads)

    def truth(self, spec: NormSpec) -> dict[str, oracle.Truth]:
        return oracle.norm(spec, self)

    def own(self, spec: NormSpec) -> dict[str, Tensor]:
        return oracle.torch_own(spec, self)

    def stats(self, spec: NormSpec) -> tuple[Tensor | None, Tensor]:
        """mean and rstd, float32."""
        if self.statistics:
            return self.statistics
        found = oracle.norm(spec, replace(self, dy=None))
        mean, rstd = (found[name].value.float() for name in ("mean", "rstd"))
        return (mean if spec.norm == "layer" else None), rstd


class Executor:
    """Plans for `target`, allocates on `device` and runs through tilenorm.ops.passes.cutile."""

    name: str
    device: str
    target: Target

    def run(self, exchange: bool = True, **constants) -> Callable:
        """A function that runs a plan's calls. `constants` replace constants of the kernels.

        exchange: a block that shares a row uses the partial sums that other blocks publish. Without
        exchange it computes the missing ones itself, and does not wait.
        """
        raise NotImplementedError

    def forward(self, spec: NormSpec, inputs: Inputs, **how) -> dict[str, Tensor]:
        """The results by name: y, and sum, mean and rstd if any. See guarded about their memory."""
        plan = plan_forward(spec, self.target, True)
        run = self.run(**how)
        with guarded():
            results = cutile.bind_forward(plan, run)(inputs.tensors(spec), inputs.eps)
        pairs = zip(OPS[spec.op].made, results, strict=True)
        return {name: t for name, t in pairs if t is not None}

    def with_own_statistics(self, spec: NormSpec, inputs: Inputs) -> Inputs:
        """The same inputs. A backward pass gets mean and rstd of this forward pass."""
        found = self.forward(spec, inputs)
        return replace(inputs, statistics=(found.get("mean"), found["rstd"]))

    def backward(
        self, spec: NormSpec, inputs: Inputs, needs: Needs | None = None, **how
    ) -> dict[str, Tensor]:
        """The needed gradients by name; by default every gradient."""
        needs = needs or every_gradient(spec)
        plan = plan_backward(spec, self.target, needs)
        dsum, saved = inputs.dsum if needs.dsum else None, inputs.saved(spec)
        run = cutile.bind_backward(plan, spec.kernel_reads, self.run(**how))
        with guarded():
            tensors = run((inputs.dy, dsum, *saved), inputs.eps)
        names = cases.GRADIENTS + cases.BY_GROUP * spec.modulated
        names += cases.OF_KEY * (spec.rotation is not None)
        grads = dict(zip(names, tensors, strict=True))
        # The oracle has those of all heads in one row.
        grads |= {n: t.reshape(-1) for n, t in grads.items() if n in SUMS and t is not None}
        return {name: t for name, t in grads.items() if t is not None}

    def rows_beyond_grid(self, spec: NormSpec, direction: str) -> int:
        """Rows with which every block of a persistent grid handles two tiles, and some a third."""
        if direction == "forward":
            plan = plan_forward(spec, self.target, True)
            streams = isinstance(plan.config, StreamForward)
            return (2 * plan.resident if streams else 2) * plan.config.rows + 1
        plan = plan_backward(spec, self.target, every_gradient(spec))
        return 2 * plan.blocks(1 << 30) * plan.config.rows + 3


class Interpreter(Executor):
    """Runs the Python function of each kernel block by block, on CPU tensors."""

    device = "cpu"

    def __init__(self, arch: str):
        self.name = f"interpreter_{arch}"
        self.target = cases.target(arch)

    def run(
        self,
        exchange: bool = True,
        fill: float = float("nan"),
        order=None,
        fuse: str = "",
        **constants,
    ) -> Callable:
        """See Executor.run. fill: the value of undefined padding. order, fuse: see
        interpreter.launch.

        Blocks run one after another, so polling would find nothing. To exchange partial
        sums, a kernel whose blocks share rows runs twice: the first run publishes all of them, and
        the second run finds them. A kernel that then exchanges maxima runs once more.
        """

        how = {"fill": fill, "order": order, "fuse": fuse}

        def run(launches, arrays, index) -> None:
            calls, before = bound(launches, arrays), None
            for call in with_arguments(calls, **({"POLLS": 0} | constants)):
                kernel, grid, arguments, overlap = call
                # clear_slots has waited for the kernel before it, and writes the slots alone, which
                # the next kernel updates.
                awaited = "update" if before is CLEAR_SLOTS else "access"
                how["early"], before = awaited if overlap else "", kernel
                interpreter.launch(grid, kernel, arguments, **how)
                if exchange and kernel is CLEAR_SLOTS:
                    arguments_of(call)["SLOTS"].zero_()
                elif exchange and arguments_of(call).get("CHUNKS", 1) > 1:
                    amax = arguments_of(call).get("AMAX", ())
                    for _ in range(2 if arguments_of(call).get("QUANT") else 1):
                        if amax != ():
                            amax.zero_()  # the sums were not known yet
                        interpreter.launch(grid, kernel, arguments, **how)

        return run


class Gpu(Executor):
    """Runs on the current GPU, with the plans that users get."""

    name, device = "gpu", "cuda"

    def __init__(self):
        from tilenorm.ops.passes.registry import device_of

        self.target = device_of("cuda", torch.cuda.current_device()).target

    def run(self, exchange: bool = True, **constants) -> Callable:
        if not exchange:
            constants["POLLS"] = 0

        def run(launches, arrays, index) -> None:
            for call in with_arguments(bound(launches, arrays), **constants):
                before, last = call.arguments[:-1], call.arguments[-1]
                launch = Launch(call.kernel, call.grid, before, lambda last: last, (), call.overlap)
                cutile.on_device([launch], last, index)

        return run


class Compiler(Executor):
    """Compiles the calls of plans into cuTile's cache and runs none. Needs no GPU."""

    name, device = "compiler", "cpu"

    def __init__(self, target: Target):
        self.target = target

    def run(self, exchange: bool = True, **constants) -> Callable:
        def run(launches, arrays, index) -> None:
            for call in bound(launches, arrays):
                compile_call(call, self.target.arch)

        return run


def _of_kind(group: tuple, items: Iterable) -> tuple:
    """A tuple of the same class as another, because cuTile takes plain tuples alone."""
    return type(group)(*items) if hasattr(group, "_fields") else tuple(items)


def forward_calls(spec: NormSpec, target: Target, rows: int, save: bool) -> list[Call]:
    """The calls of a forward pass for contiguous inputs, with tensors without memory."""
    return calls_of(plan_forward(spec, target, save), rows)


def backward_calls(spec: NormSpec, target: Target, rows: int, needs: Needs) -> list[Call]:
    """The calls of a backward pass for contiguous inputs, with tensors without memory."""
    return calls_of(plan_backward(spec, target, needs), rows)


def arguments_of(call: Call) -> dict[str, object]:
    """The arguments of a call by name. Tuples of arrays and of constants are unpacked."""
    arguments = {}
    for name, group, value in _grouped(call):
        arguments |= dict(zip(group, value, strict=True)) if group else {name: value}
    return arguments


def with_arguments(calls: list[Call], **given) -> list[Call]:
    """The calls with the arguments of these names replaced, in the kernels that have them."""
    return [
        call._replace(
            arguments=tuple(
                _of_kind(value, (given.get(n, v) for n, v in zip(group, value, strict=True)))
                if group
                else given.get(name, value)
                for name, group, value in _grouped(call)
            )
        )
        for call in calls
    ]


def _grouped(call: Call) -> list[tuple[str, tuple[str, ...], object]]:
    """(parameter, names of its tuple's items, argument) of a call; () if it is not a tuple."""
    kinds = groups(call.kernel)
    for name, kind in call.kernel._pyfunc.__globals__.items():
        if name.endswith("Arrays"):  # of which each file of kernels imports one
            kinds["ARRAYS"] = kind
    names = call.kernel._annotated_function.pysig.parameters

    def of(name: str, value) -> tuple[str, ...]:
        # A call may leave out the last arrays.
        return tuple(f.name for f in fields(kinds[name])[: len(value)]) if name in kinds else ()

    arguments = zip(names, call.arguments, strict=True)
    return [(name, of(name, value), value) for name, value in arguments]
