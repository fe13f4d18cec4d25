"""The measured implementations. Each provider turns an ``Op`` into a differentiable function.

A peer library is imported when it is first needed. It is called as its documentation shows, with
arguments that make it compute the same function as PyTorch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module

import torch
from torch import Tensor

from bench import quantized, rotated
from bench.cases import OPS
from bench.op import EPS, Op
from bench.quantized import Quantized, composed, quantize
from bench.rotated import Rotated
from bench.text import first_line


@dataclass(frozen=True)
class Provider:
    """``load(op)`` returns ``f(*inputs) -> output(s)``, or None if the provider lacks the op.

    compiles_ahead: a first call compiles, and times nothing, so that other processes may run beside
    it. torch.compile times its candidates.
    """

    name: str
    load: Callable[[Op], Callable | None]
    on_cpu: bool = False
    compiles_ahead: bool = True

    def absent(self, op: Op, device: str) -> str | None:
        """Why this provider cannot be measured, or None if it can be."""
        if device == "cpu" and not self.on_cpu:
            return "needs a GPU"
        try:
            return None if self.load(op) else f"has no {op.name}"
        except Exception as error:  # importing a peer may raise anything
            return first_line(error)


def _tilenorm(op: Op):
    import tilenorm as tn

    if isinstance(op, Quantized):
        return quantized.tilenorm(op)
    if isinstance(op, Rotated):
        return rotated.tilenorm(op)
    function: Callable = getattr(tn, op.name.split()[0].removeprefix("head_"))
    rows = len(op.rows)
    if not op.by_group:
        return lambda *given: function(*given[:rows], given[0].shape[-1:], *given[rows:], EPS)
    if rows == 1:
        return lambda x, scale, shift: function(x, x.shape[-1:], scale, shift, eps=EPS)
    return lambda x, residual, scale, shift, gate: function(
        x, x.shape[-1:], scale, shift, residual=residual, gate=gate, eps=EPS
    )


def _tilenorm_and_cast(op: Op):
    if not isinstance(op, Quantized):
        return None
    norm = _tilenorm(OPS[op.name.split()[0].removesuffix("_quantized")])
    return composed(norm, op.scaling, op.returned, compiled(quantize))


def compiled(function: Callable) -> Callable:
    import torch._dynamo
    import torch._functorch.config

    # A backward may overwrite donated buffers, and could then not be repeated.
    torch._functorch.config.donated_buffer = False
    torch._dynamo.reset()  # compile each shape anew, and stay below the limit of recompiles
    return torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)


def _quack(op: Op):
    from quack import rmsnorm

    def rms_norm(x, weight):  # takes weights (H, D), and reads a strided x in place
        return rmsnorm(x, weight, eps=EPS)

    return {
        "rms_norm": rms_norm,
        "layer_norm": _quack_layer_norm(),
        "add_rms_norm": lambda x, r, w: rmsnorm(x, w, residual=r, eps=EPS, prenorm=True),
        "head_rms_norm": rms_norm,
    }.get(op.name)


def _quack_layer_norm():
    """quack has a forward and a backward of LayerNorm, but no autograd function for them."""
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias, *parameters):
            y, rstd, mean = layernorm_fwd(x, *parameters, EPS, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, weight, rstd, mean)
            return y

        @staticmethod
        def backward(ctx, dy):
            x, weight, rstd, mean = ctx.saved_tensors
            return *layernorm_bwd(x, weight, dy, rstd, mean), None, None

    @cache  # quack needs float32 parameters, and the conversion shall not be in its time
    def widened(parameter):
        return parameter.detach().float()

    return lambda x, w, b: LayerNorm.apply(x, w, b, widened(w), widened(b))


LIGER, LIGER_CUTILE = "liger_kernel.ops", "liger_kernel.ops.cutile.ops"


def _liger(op: Op, package: str = LIGER):
    def load(module: str, name: str) -> Callable:
        # Of the submodule, because LIGER_KERNEL_IMPL changes the names in liger_kernel.ops.
        return getattr(import_module(f"{package}.{module}"), f"Liger{name}Function").apply

    # "gemma" computes in float32 to the end, as PyTorch does. "llama" rounds before the weight.
    # The last True and False are the values of in_place that Liger's modules pass. With True the
    # backward writes dx over dy. With False the Triton rms_norm would also clear a new dx, which
    # add_rms_norm does not do.
    if op.name == "rms_norm":
        rms_norm = load("rms_norm", "RMSNorm")
        return lambda x, w: rms_norm(x, w, EPS, 0.0, "gemma", True, None)
    if op.name == "layer_norm":
        layer_norm = load("layer_norm", "LayerNorm")
        return lambda x, w, b: layer_norm(x, w, b, EPS)
    if op.name == "add_rms_norm":
        add_rms_norm = load("fused_add_rms_norm", "FusedAddRMSNorm")
        return lambda x, r, w: add_rms_norm(x, r, w, EPS, 0.0, "gemma", False)
    if op.name == "modulated_rms_norm" and package == LIGER:  # Liger 0.8.5 has none
        modulated = load("modulated_rms_norm", "ModulatedRMSNorm")
        return lambda x, *by_group: modulated(x, None, *by_group, EPS, 0.0, "gemma", True)
    if isinstance(op, Rotated) and package == LIGER:
        return rotated.liger(load("rms_norm", "RMSNorm"), load("rope", "Rope"))
    return None


def _tilegym(op: Op):
    import cuda.tile as ct

    launch = ct.launch
    try:
        import tilegym
    finally:
        # Importing tilegym wraps ct.launch for the whole process, which would add to the host time
        # of all other users of cuTile.
        ct.launch = launch
    if "cutile" not in tilegym.get_available_backends_for_op(op.name):
        return None  # its dispatcher would only warn, and run Triton

    tiles = {"eps": EPS, "backend": "cutile"}
    return {
        "rms_norm": lambda x, w: tilegym.ops.rms_norm(x, x.shape[-1:], w, **tiles),
        # 1 and 2 are the first normalised axis and the end of the axes. TileGym also has
        # persistent_layer_norm, but it rounds to bfloat16 for every dtype.
        "layer_norm": lambda x, w, b: tilegym.ops.layer_norm(x, 1, 2, w, b, **tiles),
    }.get(op.name)


def _flashinfer(op: Op):
    if isinstance(op, Quantized):
        return quantized.flashinfer(op)
    from flashinfer import norm

    def add_rms_norm(x, residual, weight):
        # y is written over x, and the sum over the residual. Each call has tensors of its own. In a
        # repeated call the sum grows until a term is too small to change it.
        norm.fused_add_rmsnorm(x, residual, weight, EPS)
        return x, residual

    def rms_norm(x, weight):
        return norm.rmsnorm(x, weight, EPS)

    function = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm}.get(op.name)
    return None if function is None else partial(_without_grad, function)


def _without_grad(function: Callable, *inputs: Tensor):
    if torch.is_grad_enabled():
        raise NotImplementedError("has inference only")
    return function(*(x.detach() for x in inputs))


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("tilenorm", _tilenorm, on_cpu=True),
        Provider("torch", lambda op: op.eager, on_cpu=True, compiles_ahead=False),
        Provider("compile", lambda op: compiled(op.eager), compiles_ahead=False),
        Provider("quack", _quack),
        Provider("liger", _liger),
        Provider("liger-cutile", partial(_liger, package=LIGER_CUTILE)),
        Provider("tilegym", _tilegym),
        Provider("tilenorm+cast", _tilenorm_and_cast, compiles_ahead=False),
        Provider("flashinfer", _flashinfer),
    )
}


def attendance(ops: Iterable[str], names: Sequence[str], device: str) -> tuple[dict, dict]:
    """The providers that have each op, and for every provider that lacks an op the reasons."""
    present, reasons = {}, {}
    for op in ops:
        why = {name: PROVIDERS[name].absent(OPS[op], device) for name in names}
        present[op] = [name for name in names if why[name] is None]
        for name in filter(why.get, names):
            reasons.setdefault(name, {})[why[name]] = None  # a dict is an ordered set
    return present, {name: "; ".join(found) for name, found in reasons.items()}
