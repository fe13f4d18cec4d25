"""The measured operations and the suites of shapes, as data.

A new operation is one more ``Op`` in ``OPS`` and one line in each provider that has it. The rest of
the bench does not know the operations' names.
"""

from collections.abc import Callable

import torch.nn.functional as F

from bench.op import DTYPES, INFERENCE, Case, Op, head_rms_norm, layer_norm, of_sum, rms_norm
from bench.quantized import QUANTIZED
from bench.rotated import ROTATED
from bench.rotated import SIZES as OF_HEADS


def _ops_of(name: str, norm: Callable, columns: tuple[str, ...]) -> tuple[Op, ...]:
    """The ops of one norm. The modulated ones are those of diffusers, with x of shape (B, S, D),
    and scale, shift and gate of shape (B, D).
    """

    def added(x, skip, *parameters):
        return skip + norm(x, *parameters)

    def chained(x, skip, *parameters):
        half = len(parameters) // 2
        total = added(x, skip, *parameters[:half])
        return norm(total, *parameters[half:]), total

    def gated(x, gate, *parameters):
        return norm(x, *parameters) * F.silu(gate)

    def modulated(x, scale, shift):
        return norm(x) * (1 + scale[:, None]) + shift[:, None]

    def modulated_sum(x, residual, scale, shift, gate):
        total = residual + gate[:, None] * x
        return modulated(total, scale, shift), total

    x, both, xs, xr = ("x",), ("y", "sum"), ("x", "skip"), ("x", "residual")
    chain = (*columns, *(f"next_{column}" for column in columns))
    group, gates = {"by_group": ("scale", "shift")}, {"by_group": ("scale", "shift", "gate")}
    return (
        Op(name, norm, x, columns, ("y",)),
        Op(f"add_{name}", of_sum(norm), xr, columns, both),
        Op(f"{name}_add", added, xs, columns, ("y",)),
        Op(f"gated_{name}", gated, ("x", "gate"), columns, ("y",)),
        Op(f"{name}_add_{name}", chained, xs, chain, both),
        Op(f"modulated_{name}", modulated, x, (), ("y",), **group),
        Op(f"modulated_{name} gated", modulated_sum, xr, (), both, **gates),
    )


_PAIRS = zip(
    _ops_of("rms_norm", rms_norm, ("weight",)),
    _ops_of("layer_norm", layer_norm, ("weight", "bias")),
    strict=True,
)
_HEADS = Op("head_rms_norm", head_rms_norm, ("x",), ("weight",), ("y",), heads=32)
_EACH = (*(op for pair in _PAIRS for op in pair), _HEADS, *QUANTIZED, *ROTATED)
OPS: dict[str, Op] = {op.name: op for op in _EACH}
# The ops of one norm whose parameters are columns, and those of a gate or of two norms.
PLAIN = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
AROUND = ("rms_norm_add", "layer_norm_add", "gated_rms_norm", "gated_layer_norm")
CHAINS = ("rms_norm_add_rms_norm", "layer_norm_add_layer_norm")
MODULATED = tuple(name for name, op in OPS.items() if op.by_group)

RELEASE, LATENCY, ROTATION = "release", "latency", "rotation"
_MI = 1 << 20
_SIZES = tuple(
    sorted((*(1 << k for k in range(8, 19)), 1536, 3072, 5120, 7168, 12288, 20480, 49152))
)
# Rows of all samples, N, and samples: DiT-XL/2, SD3, Flux, Wan 2.1 14B, and a shape at which the
# launch takes longer than the memory.
_IMAGES = (16384, 1152, 64), (8192, 1536, 2), (4608, 3072, 1), (32760, 5120, 1), (1024, 1024, 1)
_TOKENS = (1, 8, 32, 128, 512)
# The sizes that README's tables show, and the N of the dtypes that are not bfloat16 in a release.
SHOWN, FEWER = (1024, 4096, 16384, 65536), (128, 256, 1152, 4096, 65536, 262144)


def _cases(ops, shapes, dtypes=tuple(DTYPES)) -> tuple[Case, ...]:
    """Every op in every dtype, for shapes (M, N) or (M, N, groups)."""
    return tuple(Case(op, dtype, *shape) for op in ops for dtype in dtypes for shape in shapes)


def _sweep(elements: int, ops, hidden, dtypes=tuple(DTYPES)) -> tuple[Case, ...]:
    return _cases(ops, [(elements // n, n) for n in hidden], dtypes)


def _of_heads(op: str, hidden, tokens, groups: int = 1) -> tuple[Case, ...]:
    """An op on heads of several sizes, with all heads of a token."""
    shapes = [(count * OPS[op].unit, n, groups) for n in hidden for count in tokens]
    return _cases([op], shapes, ["bfloat16"])


def _by_importance(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """bfloat16 first, the others in FEWER; of each what README's tables show before all else."""
    dtypes, new = list(DTYPES), (*MODULATED, *(op.name for op in ROTATED))
    kept = [case for case in cases if case.dtype == dtypes[0] or case.n in FEWER]

    def place(case: Case) -> tuple[int, bool]:
        shown = (case.op in PLAIN[:3] and case.n in SHOWN) or case.op in new
        return dtypes.index(case.dtype), not shown

    return tuple(sorted(kept, key=place))


SUITES = {
    # Few shapes, because torch.compile and some peers compile for seconds on each shape.
    "quick": _sweep(16 * _MI, ("rms_norm",), (1024, 4096, 16384), ("bfloat16",))
    + _sweep(16 * _MI, ("rms_norm",), (4096,), ("float32",))
    + _sweep(16 * _MI, ("layer_norm",), (4096,), ("float16",))
    + _sweep(16 * _MI, (*PLAIN[2:], *AROUND), (4096,), ("bfloat16",))
    + _sweep(16 * _MI, ("head_rms_norm",), (128,), ("bfloat16",)),
    # Every op in every dtype: what a release is measured with.
    RELEASE: _by_importance(
        _sweep(64 * _MI, PLAIN, _SIZES)
        + _cases(MODULATED, _IMAGES)
        + sum((_cases([op.name], [(8192 * op.unit, n, 2)]) for op, n in OF_HEADS), ())
        + _sweep(64 * _MI, (*AROUND, *CHAINS), (256, 1024, 4096, 8192, 65536, 262144))
        + _sweep(64 * _MI, ("head_rms_norm",), (32, 64, 128, 256, 512))
        + _sweep(64 * _MI, [op.name for op in QUANTIZED], (1024, 2048, 4096, 8192, 16384, 65536))
    ),
    # The published sweep of Triton's LayerNorm tutorial.
    "tutorial": _cases(["layer_norm"], [(4096, n) for n in range(1024, 15873, 512)], ["float16"]),
    # Every number of heads in every size, which torch.compile fuses with their rotation.
    ROTATION: sum((_of_heads(op.name, (64, 128, 256), (8192,), 2) for op in ROTATED), ()),
    # The decode steps of an engine, by the number of tokens in a batch.
    LATENCY: _cases(
        PLAIN[:3], [(m, n) for n in (1024, 2048, 4096, 8192) for m in _TOKENS], ["bfloat16"]
    )
    + _of_heads("head_rms_norm", (128,), _TOKENS)
    + _of_heads("rms_norm_rope 32/8", (128,), _TOKENS),
}
SUITE_DIRECTIONS = {LATENCY: (INFERENCE,)}
# A run of these goes on in the file where an earlier run ended.
RESUMED = (RELEASE, LATENCY, ROTATION)


def select(suite: str, ops=None, dtypes=None, hidden=None) -> list[Case]:
    """The cases of a suite, or only those with the given names and sizes.

    The cases are in the order of ``hidden`` if it is given, with all ops and dtypes of an N side by
    side: a run that is cut off has then measured the first sizes completely.
    """
    wanted = {"op": ops, "dtype": dtypes, "n": hidden}.items()
    cases = [
        case
        for case in SUITES[suite]
        if all(not values or getattr(case, name) in values for name, values in wanted)
    ]
    return sorted(cases, key=lambda case: hidden.index(case.n)) if hidden else cases
