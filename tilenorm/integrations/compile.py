"""torch.compile with the norms of what is compiled run by tilenorm."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from .fx.rewrite import check_where, replace_norms


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
    """torch.compile(model, ...), with the model's norms replaced by tilenorm's.

    Each graph that TorchDynamo makes goes through tilenorm.integrations.fx.replace_norms before its
    backend, and before autograd: the gradients of norms are tilenorm's too. The caches of Inductor
    and AOTAutograd see, and have as their keys, the graphs with tilenorm's ops in them.

    Args:
        model: a module or function; without it, the result is a decorator, as torch.compile's.
        where: which norms to replace, as in replace_norms. Inductor fuses a norm with elementwise
            operations around it, but not an op of tilenorm's, so that a small one may better be
            left: `lambda node: node.meta["example_value"].shape[-1] >= 1024`.
        The others are torch.compile's.

    Raises:
        TypeError: where is neither None nor a function. Else as torch.compile.
    """
    check_where("compile", where)
    options = dict(options or {})
    of_dynamo = {k: options.pop(k) for k in ("guard_filter_fn",) if k in options}
    # torch.compile makes one of these of its arguments, but not for a backend of its user's.
    if backend == "inductor":
        inner = torch._TorchCompileInductorWrapper(mode, options, dynamic)
    else:
        inner = torch._TorchCompileWrapper(backend, mode, options, dynamic)
    replacing = _Replacing(inner, where)
    return torch.compile(model, backend=replacing, dynamic=dynamic, options=of_dynamo, **others)


@dataclass(frozen=True)
class _Replacing:
    """A backend that replaces norms and leaves the rest to another."""

    inner: Callable
    where: Callable[[Node], bool] | None

    def __call__(self, graph_module: GraphModule, inputs: list) -> Callable:
        replace_norms(graph_module, where=self.where)
        return self.inner(graph_module, inputs)

    def reset(self) -> None:
        """What torch.compiler.reset does with Inductor: it drops its CUDA graphs."""
        self.inner.reset()
