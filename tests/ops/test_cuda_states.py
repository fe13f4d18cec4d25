"""Each public function and module in each state in which users call them, on CUDA.

Values and gradients are compared with the reference's on the CPU. Without a GPU, CPU tensors that
pretend to be CUDA's walk through the same table, and an interpreter runs the kernels, so that CI
runs code that CUDA alone reaches.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import product
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tilenorm
from tests.support.calls import NEEDS_GPU, name_of, slow
from tests.support.on_gpu import capture
from tests.support.oracle import Truth
from tests.support.pretended import pretended_gpu
from tests.support.quantized import bits, check
from tests.support.tolerance import assert_close
from tests.support.uses import CHAINS, HIDDEN, HOW, ROWS, USES, Outputs, Use, of_function
from tilenorm.ops import call
from tilenorm.ops.passes import cutile, native
from tilenorm.ops.pytorch import torch_private
from tilenorm.ops.torch_ops import library
from tilenorm.table import OPS


class State(NamedTuple):
    """around: the context of the forward pass. autocast: its dtype. change: of the function.
    compiles: whether `change` compiles it. step: runs a whole step. pretends: whether CPU tensors
    that pretend to be CUDA's can be in it.
    """

    around: Callable[[], AbstractContextManager] = nullcontext
    autocast: torch.dtype | None = None
    change: Callable[[Callable], Callable] = lambda function: function
    compiles: bool = False
    step: Callable[[Callable[[], Outputs]], Outputs] = lambda run: run()
    pretends: bool = True

    @property
    def has_gradients(self) -> bool:
        return self.around is nullcontext


@contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """torch.autocast("cuda", dtype), which switches itself off where there is no CUDA."""
    if dtype is None or torch.cuda.is_available():
        with torch.autocast("cuda", dtype) if dtype else nullcontext():
            yield
        return
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
        torch.clear_autocast_cache()


def compiled(compile: Callable, function: Callable) -> Callable:
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"
    return compile(function, fullgraph=True, backend=backend)


def captured(run: Callable[[], Outputs]) -> Outputs:
    """The results of a replay of a step that a CUDA graph holds."""
    graph, results = capture(run)
    for tensor in results.values():
        tensor.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return results


_B, _BY_CHECKPOINT = torch.bfloat16, lambda f: partial(checkpoint, f, use_reentrant=False)
_BY_TORCH, _BY_TILENORM = (partial(compiled, c) for c in (torch.compile, tilenorm.compile))
STATES = {
    "plain": State(),
    "no_grad": State(torch.no_grad),
    "inference_mode": State(torch.inference_mode),
    "autocast float16": State(autocast=torch.float16),
    "autocast bfloat16": State(autocast=_B),
    "autocast and no_grad": State(torch.no_grad, _B),
    "checkpoint": State(change=_BY_CHECKPOINT),
    "torch.compile": State(change=_BY_TORCH, compiles=True),
    "tilenorm.compile": State(change=_BY_TILENORM, compiles=True),
    "CUDA graph": State(step=captured, pretends=False),
    # PyTorch asks the tensors' device whether autocast is on.
    "checkpoint and autocast": State(autocast=_B, change=_BY_CHECKPOINT, pretends=False),
    "torch.compile and autocast": State(nullcontext, _B, _BY_TORCH, True, pretends=False),
    "CUDA graph and autocast": State(autocast=_B, step=captured, pretends=False),
}


def step(function: Callable[[], Outputs], leaves: dict[str, Tensor], around=nullcontext) -> Outputs:
    """The outputs, and the gradients of the leaves where there are any."""
    with around():
        outputs = function()
    results = {name: t.detach() for name, t in outputs.items()}
    used = {name: t for name, t in outputs.items() if t.requires_grad}
    if used:
        # Clones, because a gradient may be what came in, and a graph's results are overwritten.
        incoming = [
            _gradient(n, tuple(t.shape), t.dtype, t.device).clone() for n, t in used.items()
        ]
        grads = torch.autograd.grad([*used.values()], [*leaves.values()], incoming)
        results |= {f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True)}
    return results


@cache
def _gradient(name: str, shape: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers that each dtype has."""
    generator = torch.Generator().manual_seed(len(name))
    return (torch.randint(-8, 9, shape, generator=generator) / 4).to(device, dtype)


def results_of(use: Use, state: State, tensors: dict[str, Tensor]) -> Outputs:
    """Outputs and gradients by name."""
    function, rows = use.bound(tensors)
    function = state.change(function)

    @contextmanager
    def around():
        with state.around(), autocast(state.autocast):
            yield

    with use.around():
        return state.step(lambda: step(lambda: function(*rows), tensors, around))


B, H, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [(B, B), (B, F32), (H, H), (H, F32), (F32, F32), (F32, B)]  # of rows, of parameters
COMPILED = [(B, B), (H, F32)]  # a compile takes seconds
CODES = ("q", "scale", "amax")
# Public names that call no norm; override is enable and disable in turn.
NO_NORMS = {"QuantizedNorm", "ReferenceWarning", "explain", "enable", "disable", "unpatch"}
NO_NORMS |= {"decompositions", "fingerprint"}


def dtypes_of(use: Use, state: State) -> list[tuple]:
    dtypes = COMPILED if state.compiles else DTYPES
    return [pair for pair in dtypes if use.mixed or pair[0] == pair[1]]


TABLE = [
    pytest.param(USES[use], STATES[state], pair, id="-".join((use, state, *map(name_of, pair))))
    for use, state in product(USES, STATES)
    for pair in dtypes_of(USES[use], STATES[state])
]


def test_everything_public_is_in_the_table():
    public = {name for name in tilenorm.__all__ if callable(getattr(tilenorm, name))} - NO_NORMS
    classes = [value for value in vars(tilenorm.nn).values() if isinstance(value, type)]
    own = {c.__name__ for c in classes if issubclass(c, nn.Module) and "tilenorm" in c.__module__}
    own = {name for name in own if not name.startswith("_")}
    words = {name.partition(" ")[0].removeprefix("tilenorm.") for name in (*USES, *STATES)}
    assert len(own) >= 2 and public | own <= words


@cache
def reference_of(use: Use, dtypes: tuple, cast: tuple = ()) -> Outputs:
    """Outputs and gradients. cast: the rows that become float32."""
    return _reference(use, use.tensors(dtypes, "cpu"), cast)


@cache
def exact_of(use: Use, dtypes: tuple) -> Outputs:
    """The same in float64, of the same numbers."""
    tensors = use.tensors(dtypes, "cpu")
    return _reference(use, {n: nn.Parameter(t.detach().double()) for n, t in tensors.items()})


def _reference(use: Use, tensors: dict[str, Tensor], cast: tuple = ()) -> Outputs:
    parameters = {name: tensors[name] for name in use.parameters}
    function = of_function(use.like, parameters, backend="reference")
    rows = [tensors[n].float() if n in cast else tensors[n] for n in use.rows]
    return step(lambda: function(*rows), tensors)


def expected_of(use: Use, state: State, dtypes: tuple) -> Outputs:
    """By the reference, on what PyTorch's own norms would get."""
    cast = ()
    if state.autocast and OPS[use.like].norm in library.AUTOCAST_NORMS:
        skips = use.like in CHAINS or use.like.endswith("_add")
        cast = ("input", "residual") if skips else ("input", "key")
    found = reference_of(use, dtypes, cast)
    return {n: t for n, t in found.items() if state.has_gradients or "gradient" not in n}


def check_results(use: Use, state: State, dtypes: tuple, device: str) -> None:
    """Hold outputs, gradients and codes to the reference's, and to the bits of the plain state."""
    tensors = use.tensors(dtypes, device)
    got = results_of(use, state, tensors)
    if use.same_bits:
        plain = results_of(use, State(autocast=state.autocast), tensors)
        for name, tensor in got.items():
            assert torch.equal(bits(tensor), bits(plain[name])), f"{name} has other bits"
    got = {name: t.cpu() for name, t in got.items()}
    codes = {name: got.pop(name) for name in CODES if name in got}
    expected = expected_of(use, state, dtypes)
    check_kinds(got, expected)
    if codes:
        found = tilenorm.QuantizedNorm(**codes, output=got["output"])
        check(HOW, found, got["output"], HIDDEN)
    for name, own in expected.items():
        exact = exact_of(use, dtypes)[name]
        # The scale is not known: the terms of a result are about as large as the largest result.
        largest = exact.abs().max() * (ROWS if exact.dim() == 1 else 1)
        assert_close(name, got[name], Truth(exact, largest.expand_as(exact)), own)


def check_kinds(got: Outputs, expected: Outputs) -> None:
    kinds = [{n: (t.dtype, t.shape) for n, t in some.items()} for some in (got, expected)]
    assert kinds[0] == kinds[1]


@NEEDS_GPU
@pytest.mark.parametrize("use, state, dtypes", TABLE)
def test_on_a_gpu(use, state, dtypes, dynamo):
    check_results(use, state, dtypes, "cuda")


@pytest.fixture
def pretends(no_memory):
    """CPU tensors say that they are CUDA's, and the interpreter runs the kernels."""
    with (
        pretended_gpu(),
        patch.object(Tensor, "is_cuda", property(lambda tensor: True)),
        patch.object(torch_private, "empty_strided_cuda", cutile._empty_strided_cpu),
    ):
        yield


# One of RMSNorm and LayerNorm, in turn, of each pair of uses.
PAIRED = ("rms_norm", "add_layer_norm", "add_rms_norm_quantized", "layer_norm_add_layer_norm")
PAIRED += ("modulated_rms_norm", "rms_norm_rope", "LayerNorm", "patch of RMSNorm")
OTHERS = ("gated_layer_norm", "rms_norm_add", "layer_norm_quantized", "ModulatedLayerNorm")
COMPILES = ("modulated_layer_norm", "layer_norm_quantized", "RMSNorm", "patch of LayerNorm")
PRETENDING = [(name, False) for name in PAIRED]
PRETENDING += slow(*((name, False) for name in OTHERS), *((name, True) for name in COMPILES))


@pytest.mark.parametrize("name, compiles", PRETENDING)
def test_pretending(name, compiles, pretends, dynamo):
    """test_compile.py compiles in the quick run."""
    use = USES[name]
    for number, state in enumerate(STATES.values()):
        if not state.pretends or state.compiles != compiles:
            continue
        dtypes = dtypes_of(use, state)
        call.remembered.cache_clear()  # whose guards see no autocast for CUDA
        native.state().forget()  # nor do those of the extension
        check_results(use, state, dtypes[number % len(dtypes)], "cpu")
