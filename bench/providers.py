"""Who is measured: each provider turns an ``Op`` into a callable under autograd.

Peers are imported when they are first asked for, never before, and each is called the way that
its own documentation shows, with the arguments that make it compute what PyTorch computes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bench.cases import EPS, Op
from bench.record import first_line


@dataclass(frozen=True)
class Provider:
    """``load(op)`` returns ``f(*inputs) -> output(s)``, or None where it does not have the op."""

    name: str
    load: Callable[[Op], Callable | None]
    on_cpu: bool = False

    def absent(self, op: Op, device: str) -> str | None:
        """Why this provider cannot take part, or None if it can."""
        if device == "cpu" and not self.on_cpu:
            return "needs a GPU"
        try:
            return None if self.load(op) else f"has no {op.name}"
        except Exception as error:  # a peer's import may raise anything; it is shown, not hidden
            return first_line(error)


def _tilenorm(op: Op):
    import tilenorm

    return {
        "rms_norm": lambda x, weight: tilenorm.rms_norm(x, (x.shape[-1],), weight, EPS),
    }.get(op.name)


def _compile(op: Op):
    import torch._dynamo
    import torch._functorch.config

    # Donated buffers may be overwritten by the first backward, which rules out repeating it.
    torch._functorch.config.donated_buffer = False
    torch._dynamo.reset()  # each shape is compiled on its own, and no recompile limit is reached
    return torch.compile(op.eager, mode="max-autotune-no-cudagraphs", dynamic=False)


def _quack(op: Op):
    from quack import rmsnorm

    return {"rms_norm": lambda x, weight: rmsnorm(x, weight, eps=EPS)}.get(op.name)


def _liger_norms(rms_norm):
    # "gemma" keeps float32 to the end, as PyTorch does; "llama" would round before the weight.
    # in_place=True is Liger's default: dx is written over dy. Without it the Triton version
    # would also pay for clearing dx.
    return {
        "rms_norm": lambda x, weight: rms_norm.apply(x, weight, EPS, 0.0, "gemma", True, None),
    }


def _liger(op: Op):
    # By submodule: names imported from liger_kernel.ops follow LIGER_KERNEL_IMPL.
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return _liger_norms(LigerRMSNormFunction).get(op.name)


def _liger_cutile(op: Op):
    from liger_kernel.ops.cutile.ops.rms_norm import LigerRMSNormFunction

    return _liger_norms(LigerRMSNormFunction).get(op.name)


def _tilegym(op: Op):
    import cuda.tile as ct

    launch = ct.launch
    try:
        import tilegym
    finally:
        # Importing tilegym wraps ct.launch for the whole process, to print a notice once. That
        # would be added to the host time of every other user of cuTile.
        ct.launch = launch
    if "cutile" not in tilegym.get_available_backends_for_op(op.name):
        return None  # its dispatcher would fall back to Triton, with no more than a warning

    return {
        "rms_norm": lambda x, weight: tilegym.ops.rms_norm(
            x, (x.shape[-1],), weight, EPS, backend="cutile"
        ),
    }.get(op.name)


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("tilenorm", _tilenorm, on_cpu=True),
        Provider("torch", lambda op: op.eager, on_cpu=True),
        Provider("compile", _compile),
        Provider("quack", _quack),
        Provider("liger", _liger),
        Provider("liger-cutile", _liger_cutile),
        Provider("tilegym", _tilegym),
    )
}
