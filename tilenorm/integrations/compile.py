"""tilenorm.compile: torch.compile with the model's norms replaced by tilenorm's ops."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from .fx.rewrite import Report, check_where, replace_norms


def compile(
    model: Callable | None = None,
    *,
    where: Callable[[Node], bool] | None = None,
    backend: str | Callable = "inductor",
    mode: str | None = None,
    options: dict | None = None,
    dynamic: bool | None = None,
    **others,
) -> Callable:
    """Compile a model like torch.compile(model, ...), with its norms replaced by tilenorm's ops.

    Each graph that TorchDynamo captures goes through tilenorm.integrations.fx.replace_norms before
    it reaches the backend. The replacement happens before autograd, so the backward pass uses
    tilenorm's gradients too. Inductor and AOTAutograd compute their cache keys from the graphs
    after the replacement.

    Args:
        model: a module or function. Without a model, the result is a decorator, as in
            torch.compile.
        where: selects the norms to replace, as in replace_norms. Inductor fuses PyTorch's norm
            with neighbouring elementwise operations, but it cannot fuse an op of tilenorm. A small
            norm can therefore be faster if it is not replaced:
            `lambda node: node.meta["example_value"].shape[-1] >= 1024`.
        backend, mode, options, dynamic, others: as in torch.compile.

    Returns:
        What torch.compile returns, with an attribute `tilenorm_report`. It is a CompileReport of
        the norms that were replaced and left so far, because torch.compile captures graphs when
        the model is called.

    Raises:
        TypeError: `where` is neither None nor a function, or `options` is neither None nor a dict.
        RuntimeError: both mode and options are given, as in torch.compile.
        All exceptions that torch.compile raises.
    """
    check_where("compile", where)
    if options is not None and not isinstance(options, dict):
        got = type(options).__name__
        raise TypeError(f"compile: argument 'options' takes a dict or None, got {got}")
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
    replacing = _ReplacingBackend(wrapped, where)

    def compiled(model: Callable) -> Callable:
        run = torch.compile(
            model, backend=replacing, dynamic=dynamic, options=dynamo_options, **others
        )
        # A compiled module would hand the attribute on to the model.
        object.__setattr__(run, "tilenorm_report", replacing.report)
        return run

    return compiled if model is None else compiled(model)


class CompileReport:
    """What tilenorm.compile has replaced so far, and what it has left, by graph.

    graphs: a report of replace_norms for each graph that TorchDynamo has captured, in order; a
    graph that was captured again, for other sizes, comes again. Code that an equal call of
    tilenorm.compile has compiled before is not compiled again, and stands in that call's report.
    """

    def __init__(self):
        self.graphs: list[Report] = []

    @property
    def replaced(self) -> tuple[tuple[str, str], ...]:
        """(kind, node name) of each norm that became an op of tilenorm, of all graphs."""
        return tuple(entry for report in self.graphs for entry in report.replaced)

    @property
    def left(self) -> tuple[tuple[str, str], ...]:
        """(node name, reason) of each other norm, of all graphs."""
        return tuple(entry for report in self.graphs for entry in report.left)

    def __str__(self) -> str:
        if not self.graphs:
            return "no graph was captured yet"
        return "\n".join(f"graph {i}: {report}" for i, report in enumerate(self.graphs))


@dataclass(frozen=True)
class _ReplacingBackend:
    """A torch.compile backend that replaces norms and then calls another backend."""

    backend: Callable
    where: Callable[[Node], bool] | None
    # Compiled code is shared by equal backends: each layer of a model compiled alone, for example.
    report: CompileReport = field(default_factory=CompileReport, compare=False)

    def __call__(self, graph_module: GraphModule, inputs: list) -> Callable:
        self.report.graphs.append(replace_norms(graph_module, where=self.where))
        return self.backend(graph_module, inputs)

    def reset(self) -> None:
        """Reset the other backend. torch.compiler.reset calls this; Inductor drops CUDA graphs."""
        self.report.graphs.clear()
        self.backend.reset()
