"""tilenorm.compile: torch.compile with the model's norms replaced by tilenorm's ops."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..launch.tuned.compiled import SMALL
from ..ops.arguments import check_argument
from ..ops.pytorch.torch_private import inductor_joint_config
from .fx import Folds, Report
from .fx.nodes import Left
from .fx.norms import Allowed, Gradient, Norm, hidden_of, known
from .fx.rewrite import check_bool, check_where, replace_chosen

OTHER_BACKEND = "the backend is not Inductor, which has a hook for joint graphs"
OPTION = "joint_custom_post_pass"
EMULATES = "emulate_precision_casts"  # Inductor's option, by which its code rounds as eager code
NO_HOOK = f"this PyTorch's Inductor has no {OPTION}"


def compile(
    model: Callable | None = None,
    *,
    where: Callable[[Node], bool] | None = None,
    memory: str | None = None,
    rotation: bool = False,
    inexact: bool = False,
    backend: str | Callable = "inductor",
    mode: str | None = None,
    options: dict | None = None,
    dynamic: bool | None = None,
    **others,
) -> Callable:
    """Compile a model like torch.compile(model, ...), with its norms replaced by tilenorm's ops.

    Each graph that TorchDynamo captures goes through tilenorm.integrations.fx.replace_norms before
    it reaches autograd and the backend, so that the backward pass uses tilenorm's gradients too.
    Inductor and AOTAutograd compute their cache keys from the graphs after the replacement.

    With Inductor, the op of a norm's gradient also takes over the additions around it, in the joint
    graph of forward and backward: up to four terms of dy, rounded after each addition as eager
    PyTorch rounds them, and the addition of dx to another gradient, which is then rounded once. A
    pass of Inductor's option joint_custom_post_pass runs before.

    A modulation of a norm by sample, frame or token, as in diffusion transformers, belongs to the
    op, with the gate of the sum before it. With Inductor it also does where the graph computes it
    in 16 bits: the op rounds once, as Inductor's code does unless emulate_precision_casts is set.
    DiT-XL/2 trains faster with it on an H100 (bench/README.md); no other model was timed. `where`
    can leave modulated norms to Inductor.

    Args:
        model: a module or function. Without a model, the result is a decorator, as in
            torch.compile.
        where: selects the norms to replace, as in replace_norms. None leaves to Inductor, which
            fuses PyTorch's norm with its neighbours but cannot fuse an op, norms of rows of at most
            256 elements, such as those of queries and keys. None replaces all others, and all of
            other backends' graphs.
        memory: None, or "low", with Inductor: the backward pass writes the output of a norm again,
            with the same bits, and the forward pass's output is not saved where nothing else of
            the backward pass needs it. This is one more write of each such output.
        rotation: whether RMSNorm of queries and keys and the rotary embedding behind it become one
            op, whatever the size of a head. This has not been timed on a GPU. Without it, Inductor
            fuses the rotation with such norms of heads as are left to it.
        inexact: whether F.normalize(x) times the root of the row's size becomes RMSNorm, as in
            replace_norms, which says what rows differ.
        backend, mode, options, dynamic, others: as in torch.compile.

    Returns:
        What torch.compile returns, with an attribute `tilenorm_report`, a CompileReport of what
        was replaced and left so far: torch.compile captures graphs when the model is called.

    Raises:
        TypeError: `where` is neither None nor a function, `options` is neither None nor a dict, or
            `rotation` or `inexact` is not a bool.
        ValueError: `memory` is neither None nor "low", or is asked of another backend than
            Inductor.
        RuntimeError: both mode and options are given, as in torch.compile.
        All exceptions that torch.compile raises.
    """
    check_where("compile", where)
    check_bool("compile", "rotation", rotation)
    check_bool("compile", "inexact", inexact)
    right = options is None or isinstance(options, dict)
    check_argument("compile", "options", options, right, "a dict or None")
    if memory not in (None, "low"):
        raise ValueError(f"compile: argument 'memory' takes 'low' or None, got {memory!r}")
    if memory and backend != "inductor":
        what = f"takes {memory!r} with backend 'inductor' alone, got backend {backend!r}"
        raise ValueError(f"compile: argument 'memory' {what}")
    if mode is not None and options is not None:
        raise RuntimeError(f"compile: argument 'mode' takes None beside options, got {mode!r}")
    options = dict(options or {})
    dynamo_options = {k: options.pop(k) for k in ("guard_filter_fn",) if k in options}
    # torch.compile wraps a backend given by name in one of these, but not a backend given as a
    # function. The wrapper here keeps mode, options and the checks of them.
    if backend == "inductor":
        wrapped = torch._TorchCompileInductorWrapper(mode, options, dynamic)
    else:
        wrapped = torch._TorchCompileWrapper(backend, mode, options, dynamic)
    replacing = _ReplacingBackend(wrapped, where, memory, backend == "inductor", rotation, inexact)

    def compiled(model: Callable) -> Callable:
        run = torch.compile(
            model, backend=replacing, dynamic=dynamic, options=dynamo_options, **others
        )
        # A compiled module would hand the attribute on to the model.
        object.__setattr__(run, "tilenorm_report", replacing.report)
        return run

    return compiled if model is None else compiled(model)


def _entries(reports: str, name: str) -> property:
    return property(lambda self: tuple(e for r in getattr(self, reports) for e in getattr(r, name)))


class CompileReport:
    """What tilenorm.compile has replaced so far, and what it has left, by graph.

    graphs: a report of replace_norms for each graph that TorchDynamo has captured, in order; a
    graph that was captured again, for other sizes, comes again. Code that an equal call of
    tilenorm.compile has compiled before is not compiled again, and stands in that call's report.

    folds: for each joint graph of Inductor with something to fold. A graph whose code AOTAutograd
    found in its cache has no entry. not_folding: why no graph has one, or None.

    Of all graphs together: replaced and left have the entries that a Report has under these names;
    folded and unfolded have those that a Folds has as folded and as left.
    """

    replaced = _entries("graphs", "replaced")
    left = _entries("graphs", "left")
    folded = _entries("folds", "folded")
    unfolded = _entries("folds", "left")

    def __init__(self, not_folding: str | None = None):
        self.graphs: list[Report] = []
        self.folds: list[Folds] = []
        self.not_folding = not_folding

    def clear(self) -> None:
        self.graphs.clear()
        self.folds.clear()

    def __str__(self) -> str:
        if not self.graphs:
            return "no graph was captured yet"
        lines = [f"graph {i}: {report}" for i, report in enumerate(self.graphs)]
        for i, folds in enumerate(self.folds):
            head = f"joint graph {i}: {len(folds.folded)} folds, {len(folds.left)} not folded"
            lines += [head, *folds.lines]
        return "\n".join(lines + [f"no sum is folded: {why}" for why in [self.not_folding] if why])


@dataclass(frozen=True)
class _ReplacingBackend:
    """A torch.compile backend that replaces norms and then calls another backend."""

    backend: Any
    where: Callable[[Node], bool] | None
    memory: str | None
    is_inductor: bool
    rotation: bool
    inexact: bool
    # Compiled code is shared by equal backends: each layer of a model compiled alone, for example.
    report: CompileReport = field(default_factory=CompileReport, compare=False)

    def __call__(self, graph_module: GraphModule, inputs: list) -> Callable:
        config = inductor_joint_config() if self.is_inductor else None
        # Inductor's own code keeps float32 between operations in 16 bits, unless it is told not to.
        emulates = self.is_inductor and self._option(config, EMULATES)
        allowed = Allowed(self.is_inductor and not emulates, self.rotation, self.inexact)
        self.report.graphs.append(replace_chosen(graph_module, self._choose, allowed))
        return self._folding(config)(graph_module, inputs)

    def _choose(self, norm: Norm | Gradient) -> None:
        if self.where is not None:
            if not self.where(norm.at):
                raise Left("where() excludes it")
        elif getattr(norm, "rotation", None) is not None:
            return
        elif self.is_inductor and (count := hidden_of(known(norm.x), norm.dims)) <= SMALL:
            raise Left(f"Inductor fuses a norm of {count} elements with its neighbours")

    def _folding(self, config: object | None) -> Callable:
        """The other backend; if it is Inductor, with a pass more in its configuration."""
        if config is None:
            self.report.not_folding = NO_HOOK if self.is_inductor else OTHER_BACKEND
            return self.backend
        from .joint import FoldPass

        others = self._option(config, OPTION)
        folding = FoldPass(others, self.memory == "low", self.report.folds.append)
        backend = copy(self.backend)
        backend.config = {**self.backend.config, OPTION: folding}
        return backend

    def _option(self, config: object | None, name: str) -> Any:
        """An option of Inductor: the caller's, or its configuration's."""
        return self.backend.config.get(name, getattr(config, name, None))

    def reset(self) -> None:
        """Reset the other backend. torch.compiler.reset calls this; Inductor drops CUDA graphs."""
        self.report.clear()
        self.backend.reset()
