"""tilenorm.explain: which implementation serves a call, why others do not, and its launches."""

import inspect
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..launch import heuristics
from ..launch.calls import Sizes, constants_of, every_gradient
from ..launch.config import Hints
from ..launch.target import Target
from ..ops import arguments, functional, functional_quantized
from ..ops.passes.bound import specs_of_tensors
from ..ops.passes.registry import MIN_DRIVER, Device, device_of, refusals, requested_backend
from ..row import Op
from ..spec import NormSpec
from ..table import MOD_SCALE, OPS
from .specs import moved_bytes, options_of


@dataclass(frozen=True)
class Step:
    """One kernel launch: its grid, the compiler's hints, and its compile-time constants by name."""

    kernel: str
    grid: tuple[int, ...]
    hints: dict[str, int]
    constants: dict[str, object]


class ChainExplanation(NamedTuple):
    """How a norm, an addition and a norm are served: explanations of the two functions, and why
    they are not one pass, or None.
    """

    before: "Explanation"
    after: "Explanation"
    refused: str | None


@dataclass(frozen=True)
class Explanation:
    """How a call is served.

    chosen: the implementation that serves, or None if the requested backend cannot serve.
    refused: the implementations that were not chosen although they come first, with the reasons.
    forward, backward: the launches; empty for the reference. forward_source, backward_source: the
    table or rule of the configuration, or None. forward_bytes, backward_bytes: bytes that the
    mathematics moves, with each input read once and each output written once. terms: how many
    tensors make up dy.
    """

    spec: NormSpec
    rows: int
    device: Device
    chosen: str | None
    refused: dict[str, str]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    forward_source: str | None
    backward_source: str | None
    forward_bytes: int
    backward_bytes: int
    terms: int = 1

    def __str__(self) -> str:
        spec, arch = self.spec, self.device.target.name if self.device.target else self.device.kind
        lines = [
            f"{spec.op} of {self.rows} rows of {spec.hidden} {spec.dtype} on {arch}"
            f" ({options_of(spec, self.terms)})",
            f"  served by {self.chosen or 'nothing: the call raises'}",
        ]
        lines += [f"  refused by {name}: {reason}" for name, reason in self.refused.items()]
        for name in ("forward", "backward"):
            steps, source, moved = (getattr(self, name + end) for end in ("", "_source", "_bytes"))
            chosen = f", configuration: {source}" if source else ""
            lines.append(f"  {name}: {moved:,} bytes{chosen}")
            for step in steps:
                hints, constants = (
                    " ".join(f"{k}={v}" for k, v in values.items())
                    for values in (step.hints, step.constants)
                )
                lines.append(f"    {step.kernel} grid {step.grid} hints {hints or 'none'}")
                lines.append(f"      {constants}")
        return "\n".join(lines)


def explain(op: str, *args, **kwargs) -> Explanation | ChainExplanation:
    """Print, and return, how `op` would serve a call with these arguments. Launches nothing.

    Args: op is the name of a function, such as "rms_norm". The other arguments are those of the
    function.
    Raises: ValueError for an unknown op, and whatever the op raises for bad input.
    """
    if not isinstance(op, str) or op not in OPS:
        raise ValueError(f"explain: argument 'op' takes one of {', '.join(OPS)}, got {op!r}")
    row = OPS[op]
    module = functional_quantized if row.quantized else functional
    bound = inspect.signature(getattr(module, op)).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments_of_call = bound.arguments
    if row.rotated:
        _heads_last(arguments_of_call)
    tensors = tuple([arguments_of_call.get(port.argument) for port in row.takes])
    if arguments.is_sequence(row, tensors):
        tensors = arguments.spread(row, tensors)
    asked = tuple([arguments_of_call[name] for name in row.options])
    shape, eps, backend, input = (
        arguments_of_call[name] for name in ("normalized_shape", "eps", "backend", "input")
    )
    options = arguments.check(row, tensors, shape, eps, asked, backend)
    what, sizes = specs_of_tensors(row, tensors, options), _sizes(row, tensors)
    scale = row.by_role(tensors).get(MOD_SCALE.role)
    groups = scale.numel() // options[0] if scale is not None and options[0] else 0
    rows = input.numel() // options[0] if options[0] else 0
    device = device_of(input.device.type, input.device.index)
    norms = [explain_spec(spec, rows, device, backend, 1, sizes, groups) for spec in what.specs]
    print(*norms, sep="\n")
    if not row.calls:
        return norms[0]
    refused = "cutile does not serve both norms"
    if {norm.chosen for norm in norms} == {"cutile"}:
        from ..launch.plan import chain_refused

        refused = chain_refused(what.spec, device.target)
    print("  in one pass" if refused is None else f"  in two calls: {refused}")
    return ChainExplanation(norms[0], norms[1], refused)


def _heads_last(arguments_of_call: dict) -> None:
    """Make what the function of rotated heads is given that which its op takes."""
    if arguments_of_call["output_heads_first"] is None:
        arguments_of_call["output_heads_first"] = arguments_of_call["heads_first"]
    if arguments_of_call["heads_first"]:
        arguments_of_call |= {
            name: arguments.heads_last(name, arguments_of_call[name]) for name in ("input", "key")
        }


def _sizes(row: Op, tensors: tuple) -> Sizes | None:
    if not row.rotated:
        return None
    tensors_by_role = row.by_role(tensors)
    *tokens, heads, _ = tensors_by_role["x"].shape
    key = tensors_by_role["key"]
    return Sizes(math.prod(tokens[:-1]), tokens[-1], heads, 0 if key is None else key.shape[-2])


def explain_spec(
    spec: NormSpec,
    rows: int,
    device: Device,
    backend: str | None = None,
    terms: int = 1,
    sizes: Sizes | None = None,
    groups: int = 0,
) -> Explanation:
    """Explain how a spec would be served on a device, which need not be in this machine.

    terms: how many tensors make up dy. sizes: of heads that are rotated; None for those of
    sizes_of. groups: of modulated rows.
    """
    backend = backend or requested_backend()
    reasons = refusals(spec, rows, device)
    serving = [name for name, reason in reasons.items() if reason is None]
    chosen = serving[0] if backend is None else backend if backend in serving else None
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    if chosen is None:
        refused[backend] = f"asked for, but {reasons.get(backend, 'there is no such backend')}"
    elif chosen != serving[0]:
        refused[serving[0]] = f"backend {chosen!r} was asked for"
    passes = ((), None), ((), None)
    if chosen == "cutile" and rows:
        passes = _passes(spec, rows, device.target, terms, sizes)
    steps, sources = zip(*passes, strict=True)
    moved = moved_bytes(spec, rows, terms, sizes, groups)
    return Explanation(spec, rows, device, chosen, refused, *steps, *sources, *moved, terms)


def _passes(spec: NormSpec, rows: int, target: Target, terms: int, sizes: Sizes | None) -> tuple:
    """(steps, source) of the forward pass and of the backward pass."""
    from ..launch.plan import plan_backward, plan_forward
    from .precompile import calls_of

    plan, source = plan_forward(spec, target, True), heuristics.source(spec, target)
    if spec.quantized and not plan.spec.quantized:
        reason = replace(plan, spec=spec).casts_apart
        source += f"; PyTorch's operations quantise afterwards: {reason}"
    forward = _steps(calls_of(plan, rows, sizes=sizes)), source
    if not spec.differentiable:
        return forward, ((), None)
    needs = every_gradient(spec)._replace(terms=terms)
    plan = plan_backward(spec, target, needs)
    calls = calls_of(plan, rows, sizes=sizes)
    return forward, (_steps(calls), heuristics.source(plan.spec, target, needs))


def _steps(calls) -> tuple[Step, ...]:
    steps = []
    for kernel, grid, values, _ in calls:
        options = kernel._compiler_options
        hints = Hints(options.occupancy, options.num_worker_warps).given()
        steps.append(Step(kernel._pyfunc.__name__, grid, hints, constants_of(kernel, values)))
    return tuple(steps)


def planned_device(arch: str) -> Device:
    """A device of an architecture, with a sufficient driver. It need not be in this machine."""
    return Device("cuda", Target.of(arch), MIN_DRIVER)


def gpu() -> Device:
    """The current GPU. Raises RuntimeError if there is none."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no NVIDIA GPU, or no driver for it")
    return device_of("cuda", torch.cuda.current_device())
