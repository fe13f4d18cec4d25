"""Paired training steps: two variants in one process, over the same weights, in turn.

Both variants are modules with the same parameters and one optimizer, so memory holds the weights
once. First both compute the loss and the gradients of the same weights, which are compared. Then
the steps alternate: A B, B A, A B and so on, so that neither is always first, and a drift of the
machine's speed is in both alike. Everything here runs in a worker process.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from bench import models, norms, parallel
from bench.shapes import LLAMA, MODELS, Shape
from bench.text import first_line
from bench.timing import Timer
from bench.turns import order

LEARNING_RATE, SEED = 1e-4, 0
WARM_UP = 2  # pairs of steps
# A larger change of a gradient is an error. In Llama 3's form with 32 layers of 512 on a CPU, with
# weights of Llama's gain, bfloat16's gradients differ from float32's by up to 0.13. One term that
# is left out of one layer's sum of gradients changes one of them by at least 0.5.
MOST_CHANGE = 0.4
# A gradient whose elements are smaller than this share of the mean is compared with the share: the
# gradient of the bias of k is 0, and what is computed for it is rounding alone.
LEAST_SIZE = 0.1
NAME_LENGTH = 100  # of a kernel


@dataclass(frozen=True)
class Settings:
    """All settings of a training step except its variant."""

    shape: Shape = field(default_factory=Shape)
    model: str = LLAMA
    whole: bool = False
    device: str = "cuda"
    fsdp: int = 1
    tp: int = 1
    deterministic: bool = False

    @property
    def gpus(self) -> int:
        return self.fsdp * self.tp

    @property
    def tokens(self) -> int:
        """The tokens of a step, of all processes. Each group of tp processes has its own batch."""
        return self.shape.batch * self.shape.length * self.fsdp

    @property
    def label(self) -> str:
        """The model, its layers and tokens, and how it is trained. Steps of one label compare."""
        listed, given = MODELS[self.model], self.shape
        free = {name: getattr(listed, name) for name in ("layers", "batch", "length")}
        same = replace(given, **free) == listed
        words = [self.model if same else f"{self.model}'s form in other sizes"]
        words += [f"{given.layers} layers", f"{given.batch} x {given.length} tokens"]
        words += ["whole"] * self.whole
        words += [f"fsdp {self.fsdp}, tp {self.tp}"] * (self.gpus > 1)
        words += ["deterministic"] * self.deterministic
        return ", ".join(words)


# The options of ``tilenorm.patch``, the package whose modules take the places of the norms, or None
# for the model's own norms; and the package whose ``compile`` gets the model, with its options.
VARIANTS: dict[str, tuple[dict | str | None, str | None, dict]] = {
    "eager": (None, None, {}),
    "modules": ("tilenorm", None, {}),
    "liger": ("liger", None, {}),
    "compile": (None, "torch", {}),
    "patch": ({}, None, {}),
    "patch-add": ({"residual": True}, None, {}),
    "patch-modulation": ({"residual": True, "modulation": True}, None, {}),
    "patch-rotation": ({"residual": True, "rotation": True}, None, {}),
    "patch-compile": ({}, "torch", {}),
    "tilenorm-compile": (None, "tilenorm", {}),  # replaces norms in the graph
    "tilenorm-compile-low": (None, "tilenorm", {"memory": "low"}),
    "tilenorm-compile-rotation": (None, "tilenorm", {"rotation": True}),
}


class Training:
    """A model with its optimizer, and the inputs of every step."""

    def __init__(self, given: Settings, model: Any, seed: int = SEED):
        fused = given.device != "cpu"
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=fused)
        self.inputs = model.drawn(seed, given.device, torch.bfloat16)

    def step(self, call: Callable[..., Tensor], done: Callable = lambda: None) -> Tensor:
        """A whole step of the model, whose loss ``call`` computes. ``done`` is called after the
        forward, after the backward, and after the optimizer.
        """
        loss = call(*self.inputs)
        done()
        loss.backward()
        done()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        done()
        return loss.detach()


def model_of(shape: Shape, **factory) -> nn.Module:
    """The model with random weights, the same at every call."""
    model = (models.Diffusion if shape.adaptive else models.Transformer)(shape, **factory)
    models.reset(model, SEED)
    return model


def absent(variant: str) -> str | None:
    """Why a variant cannot be measured here, or None if it can be."""
    package = VARIANTS[variant][0]
    return norms.absent(package) if isinstance(package, str) else None


def prepared(model: nn.Module, variant: str, whole: bool) -> tuple[Callable, list]:
    """What to call, and the reports of what tilenorm replaced. The norms of the model are replaced,
    and its layers are compiled, in place.
    """
    import tilenorm

    how, package, options = VARIANTS[variant]
    reports: list = []
    if how is not None:
        patched = (
            norms.replace(model, how) if isinstance(how, str) else tilenorm.patch(model, **how)
        )
        reports.append(patched)
    if package is None:
        return model, reports

    def compiled(part: nn.Module) -> nn.Module:
        run = {"torch": torch, "tilenorm": tilenorm}[package].compile(part, **options)
        reports.append(getattr(run, "tilenorm_report", None))
        return run

    if whole:
        return compiled(model), reports
    model.blocks = nn.ModuleList(map(compiled, model.blocks))
    model.head = compiled(model.head)
    return model, reports


def said(reports: list) -> str:
    """The reports that say anything. Layers that share compiled code have one report."""
    return "\n".join(str(r) for r in reports if r is not None and getattr(r, "graphs", True))


def share(model: nn.Module, other: nn.Module) -> None:
    """Give a model the parameters of another, whose layers may be compiled or not."""
    prefix, tensors = "_orig_mod.", other.state_dict(keep_vars=True)
    given = {name.replace(prefix, ""): tensor for name, tensor in tensors.items()}
    named = {name: given[name.replace(prefix, "")] for name in model.state_dict()}
    model.load_state_dict(named, assign=True)


def measure(names: Sequence[str], given: Settings, pairs: int, deadline: float) -> dict:
    """The fields of a record's Pair. No pair starts after the deadline, a value of time.time().

    The processes of a parallel step call it together, and all get the same fields.
    """
    torch.use_deterministic_algorithms(given.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    training, both = built(given, names)
    calls = [call for call, _ in both]
    found = compared(training, calls)
    found |= {"reports": [said(reports) for _, reports in both], "gpus": given.gpus}
    if wrong := complaint(found):
        return found | {"status": "wrong", "error": wrong}
    losses: list[Tensor] = []
    steps = [lambda call=call: losses.append(training.step(call)) for call in calls]
    timer = Timer(given.device)
    alternated(steps, WARM_UP, timer, deadline)
    times, peaks = alternated(steps, pairs, timer, deadline)
    found |= {"pairs_us": times, "peak_bytes": peaks}
    found["step_losses"] = [loss.item() for loss in losses]
    if given.gpus > 1:
        found["ranks"] = parallel.of_all({"pairs_us": times, "peak_bytes": peaks})
        for name in ("pairs_us", "peak_bytes") if given.device != "cpu" else ("pairs_us",):
            of_ranks = [rank[name] for rank in found["ranks"]]
            found[name] = torch.tensor(of_ranks, dtype=torch.float64).amax(0).tolist()
    if not times:
        return found | {"status": "skipped", "error": "no time was left after compiling"}
    if given.device != "cpu" and given.gpus == 1:
        try:
            found["kernels"] = [kernels_of(step) for step in steps]
        except Exception as error:  # PyTorch's profiler raises many types
            found["error"] = f"no kernels: {first_line(error)}"
    return found


def built(given: Settings, names: Sequence[str]) -> tuple[Training, list[tuple[Callable, list]]]:
    """The training of the first variant's model, and both variants with its parameters."""
    mesh, made, both = None, [], []
    if given.gpus > 1:
        sizes = given.fsdp, given.tp
        mesh = init_device_mesh(given.device, sizes, mesh_dim_names=parallel.DIMENSIONS)
    for name in names:
        made.append(model := model_of(given.shape, device=given.device, dtype=torch.bfloat16))
        of_tilenorm = VARIANTS[name][0] not in (None, "liger")  # the modules that run the norms
        parallel.split(model, mesh, gathers=not of_tilenorm)
        both.append(prepared(model, name, given.whole))
        parallel.sharded(model, mesh)
        share(model, made[0])
    seed = SEED + (0 if mesh is None else mesh.get_local_rank("fsdp"))
    return Training(given, made[0], seed), both


def compared(training: Training, calls: Sequence[Callable[..., Tensor]]) -> dict:
    """Both losses, and the largest change of a gradient, from the same weights."""
    losses, gradients = [], []
    for call in calls:
        loss = call(*training.inputs)
        loss.backward()
        losses.append(loss.detach().double())
        gradients.append({n: parallel.local(p.grad) for n, p in training.model.named_parameters()})
        training.optimizer.zero_grad(set_to_none=True)
    shares = parallel.total(torch.ones_like(losses[0]))
    losses = (parallel.total(torch.stack(losses)) / shares).tolist()
    changes = changes_of(*gradients)
    # A NaN is larger than all.
    worst = max(changes, key=lambda name: (math.isnan(changes[name]), changes[name]))
    return {"losses": losses, "gradient_change": changes[worst], "gradient": worst}


def complaint(found: dict) -> str:
    """What is wrong with a variant's gradients, from the fields of ``compared``, or ""."""
    if found["gradient_change"] <= MOST_CHANGE:
        return ""
    base, other = found["losses"]
    why = f"the gradient of {found['gradient']} changes by {found['gradient_change']:.3g} of"
    return why + f" its norm, more than {MOST_CHANGE}; the losses are {base:.4f} and {other:.4f}"


def changes_of(base: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """‖other - base‖ / ‖base‖ of each gradient. See LEAST_SIZE for gradients of about 0.

    Of a gradient that is cut, each process has a part.
    """
    norms = [
        torch.stack([g.float().norm(), (other[name].float() - g.float()).norm()])
        for name, g in base.items()
    ]
    squares = torch.stack(norms).double() ** 2
    elements = squares.new_tensor([[g.numel()] for g in base.values()])
    squares = parallel.total(torch.cat((squares, elements), 1))
    mean = math.sqrt(squares[:, 0].sum() / squares[:, 2].sum())
    least = LEAST_SIZE * mean * squares[:, 2].sqrt()
    size = squares[:, 0].sqrt().maximum(least)
    changes = squares[:, 1].sqrt() / size.where(size > 0, 1.0)
    return dict(zip(base, changes.tolist(), strict=True))


def alternated(
    steps: Sequence[Callable], pairs: int, timer: Timer, deadline: float
) -> tuple[list[list[float]], list[int | None]]:
    """The microseconds of both steps of each pair, and the most bytes that each step needs.

    No pair starts after the deadline. The host queues one pair while the GPU computes another.
    The host allocates and frees memory in the order of its own calls, so its peak needs no waiting.
    """
    marks: list[dict] = []
    ends: list = []
    peaks: list[list[int]] = [[], []]
    for i in range(pairs):
        if not parallel.agreed(time.time() < deadline):
            break
        marks.append({})
        for which in order((0, 1), i):
            if not timer.on_cpu:
                torch.cuda.reset_peak_memory_stats()
            start = timer.mark()
            steps[which]()
            marks[i][which] = start, (end := timer.mark())
            if not timer.on_cpu:
                peaks[which].append(torch.cuda.max_memory_allocated())
        ends.append(end)
        if i:
            timer.wait(ends[i - 1])
    for end in ends[-1:]:
        timer.wait(end)
    times = [[timer.between(*pair[which]) for which in (0, 1)] for pair in marks]
    return times, [max(found, default=None) for found in peaks]


def kernels_of(step: Callable) -> list[dict]:
    """The name, calls and ms of each kernel of one step, those with the most time first."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    return by_name((event.name, event.device_time_total) for event in events)


def by_name(ran: Iterable[tuple[str, float]]) -> list[dict]:
    """The kernels of each name, given the names and the microseconds of all that ran.

    cuTile appends _K and the types of the arguments to the name of a kernel's function.
    """
    found: dict[str, dict] = {}
    for name, us in ran:
        shown = name.partition("_K")[0][:NAME_LENGTH]
        line = found.setdefault(shown, {"name": shown, "calls": 0, "ms": 0.0})
        line["calls"] += 1
        line["ms"] += us / 1e3
    return sorted(found.values(), key=lambda line: -line["ms"])
