"""No call leaves memory behind: nothing grows with their number, and no tensor is kept alive. With
launches that do nothing, and of any number of calls on a GPU too, where there is one.

Threads and processes that call at once get what one caller gets, and one warning.
"""

import gc
import sys
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tilenorm
from tests.support.calls import (
    CALLS,
    FAMILY,
    FEW,
    NEEDS_GPU,
    call,
    incoming_of,
    leaves_of,
    messages,
    op_call,
    random,
    same,
    slow,
    step,
    tensors_of,
)
from tests.support.pretended import WARM, pretended_gpu
from tilenorm.launch.tiling import SIZES
from tilenorm.ops.call import MOST_CALLS
from tilenorm.ops.passes import cutile

KINDS = ("plain", "steps", "negative", "strided", "op", "refused")


SERVED = ("reference", "kernels", "extension")
QUICK = ("reference", "extension")  # of the longest test


@pytest.fixture(params=SERVED)
def served(request):
    """The device: by the reference, or up to the launches, which do nothing, or on a GPU."""
    if request.param == "extension":
        request.getfixturevalue("extension")
    if request.param in ("reference", "cuda"):
        yield "cpu" if request.param == "reference" else "cuda"
    else:
        with (
            pretended_gpu(),
            patch.object(cutile, "launch", lambda *_: None),
            patch.object(cutile, "prepare", lambda *_: lambda *_: True),
        ):
            yield "cpu"


def made(forms: Iterable[str], device: str) -> list[tuple]:
    """Forms with tensors of several shapes and dtypes."""
    return [
        (form, tensors_of(form, *lead, n, dtype=dtype, device=device))
        for form in map(CALLS.get, forms)
        for lead, n, dtype in (((5,), 16, torch.float32), ((2, 3), 9, torch.bfloat16))
    ]


def one_call(kind: str, form, tensors, eps: float) -> None:
    x, w = tensors["input"], tensors["weight"]
    match kind:
        case "plain":
            call(form, tensors, eps=eps)
        case "steps":
            step(form, tensors, eps=eps)
        case "negative":
            incoming = [torch._neg_view(dy) for dy in incoming_of(tensors)]
            step(form, tensors | {"input": torch._neg_view(x)}, incoming, eps=eps)
        case "strided":
            call(form, tensors | {"input": x.unsqueeze(-1).expand(*x.shape, 2)[..., 0]}, eps=eps)
        case "op":
            op_call("rms_norm", {"input": x, "weight": w}, w.numel(), eps=eps)
        case "refused":
            with pytest.raises(RuntimeError):
                call(form, tensors | {"weight": x.new_ones(77)}, eps=eps)


def held() -> tuple[int, int, int, int]:
    """Blocks of Python's allocator, objects of its collector, pages of the process, and the bytes
    of tensors on the GPU.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return sys.getallocatedblocks(), len(gc.get_objects()), pages, torch.cuda.memory_allocated()


@pytest.mark.any_torch
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("forms, calls", [(FEW, 400), *slow(([*CALLS], 1500))])
@pytest.mark.parametrize(
    "served", [*QUICK, *slow("kernels"), pytest.param("cuda", marks=NEEDS_GPU)], indirect=True
)
def test_nothing_grows_with_the_number_of_calls(served, forms, calls):
    every = [(kind, *given, 1e-6) for kind in KINDS for given in made(forms, served)]
    draw = Random(0)
    for one in every * WARM:  # until then a call is remembered
        one_call(*one)
    pages = []
    for _ in range(2):
        before = held()
        for _ in range(calls // 2):
            one_call(*draw.choice(every))
        blocks, objects, more, on_gpu = (b - a for a, b in zip(before, held(), strict=True))
        assert blocks < calls // 2 and objects < 100  # less than one block for a call
        assert not on_gpu
        pages.append(more)
    # 4 MB, which the allocators may keep for themselves. They may take more once, but not again.
    assert min(pages) < 1024


@pytest.mark.any_torch
def test_numbers_that_never_come_again_fill_caches_of_a_fixed_size(served):
    """Row counts and eps are keys of caches. Their entries are as many after more calls. Small and
    large batches have entries of their own.
    """
    x, w = torch.ones(3 * MOST_CALLS, 8), random(8)

    def calls(first: int, count: int = MOST_CALLS + 9) -> None:
        for number in range(first, first + count):
            tilenorm.rms_norm(x[:number], (8,), w, 1e-9 * number)

    calls(1)
    calls(3 * MOST_CALLS - SIZES, SIZES)
    before = held()
    calls(MOST_CALLS + 10)
    blocks, objects, *_ = (b - a for a, b in zip(before, held(), strict=True))
    assert blocks < 500 and objects < 100


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "refused"])
def test_no_tensor_is_kept_alive(served, kind):
    alive = []
    for form in map(CALLS.get, FEW):
        for _ in range(WARM + 1):
            tensors = tensors_of(form, 5, 16)
            one_call(kind, form, tensors, 1e-6)
            alive += map(weakref.ref, tensors.values())
            alive += [weakref.ref(t.untyped_storage()) for t in tensors.values()]
    del tensors
    gc.collect()
    assert not any(one() is not None for one in alive)


def test_a_graph_that_is_dropped_frees_what_it_saved(served, form):
    """Without the garbage collector: no cycle holds an output, or what the backward pass needs."""
    tensors = leaves_of(tensors_of(form, 5, 16))
    gc.disable()
    try:
        for backward in (False, True) * WARM:
            given = tensors | {"input": tensors["input"] * 1}  # which the graph alone keeps
            outputs = call(form, given)
            alive = [weakref.ref(t) for t in (given["input"], *outputs)]
            if backward:
                torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
            del outputs, given
            assert not any(one() is not None for one in alive)
    finally:
        gc.enable()


def test_a_report_of_patched_modules_keeps_no_model_alive():
    model = nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16), nn.LayerNorm(16))
    report = tilenorm.patch(model)
    parameters = [weakref.ref(p) for p in model.parameters()]
    del model, report
    gc.collect()
    assert not any(one() is not None for one in parameters)


THREADS = 6


def at_once(functions) -> list:
    """What functions return or raise, each called in a thread of its own, all at once."""
    barrier = threading.Barrier(len(functions))

    def run(function):
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as threads:
        calls = [threads.submit(run, function) for function in functions]
    return [call.exception() or call.result() for call in calls]


def trained(seed):
    """A training step of random inputs of its own."""
    form = FAMILY["add_layer_norm"]
    torch.manual_seed(seed)
    tensors = {n: t + seed for n, t in tensors_of(form, 5, 64).items()}
    return step(form, tensors, incoming_of(tensors))


def test_threads_that_meet_a_spec_at_once(no_memory, told):
    found = at_once([partial(trained, seed) for seed in range(THREADS)])
    for seed, results in enumerate(found):
        assert same(results, trained(seed))
    assert len(messages(told)) == 1


class Normalized(Dataset):
    """Rows that a DataLoader's worker normalises, and their gradient."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        x = (torch.arange(32.0).view(2, 16) + index).requires_grad_()
        y = tilenorm.layer_norm(x, (16,))
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        return y.detach(), grad


def test_workers_of_a_data_loader():
    data = Normalized()
    expected = [data[i] for i in range(len(data))]  # what a forked worker remembers
    loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork")
    ys, grads = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert torch.equal(ys, torch.stack([y for y, _ in expected]))
    assert torch.equal(grads, torch.stack([g for _, g in expected]))
