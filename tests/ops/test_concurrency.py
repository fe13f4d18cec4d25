"""Threads and processes that call at once get what one caller gets, and one warning."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import tilenorm

from .helpers import FAMILY, incoming_of, same, slow, step, tensors_of

pytestmark = pytest.mark.usefixtures("no_memory")

THREADS = 6
NAMES = ("rms_norm", "add_layer_norm", "gated_rms_norm")


def at_once(functions) -> list:
    """What functions return or raise, each called in a thread of its own, all at once."""
    barrier = threading.Barrier(len(functions))

    def run(function):
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as threads:
        calls = [threads.submit(run, function) for function in functions]
    return [call.exception() or call.result() for call in calls]


def trained(name, seed):
    """A training step of random inputs of its own."""
    form = FAMILY[name]
    torch.manual_seed(seed)
    tensors = {n: t + seed for n, t in tensors_of(form, 5, 64).items()}
    return step(form, tensors, incoming_of(tensors))


@pytest.mark.parametrize("name", NAMES)
def test_threads_that_meet_a_spec_at_once(name, no_memory):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = at_once([partial(trained, name, seed) for seed in range(THREADS)])
    for seed, results in enumerate(found):
        assert same(results, trained(name, seed))
    ours = [w for w in told if w.category is tilenorm.ReferenceWarning]
    assert len(ours) == 1


class Normalized(Dataset):
    """Rows that a DataLoader's worker normalises, and their gradient."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        x = (torch.arange(32.0).view(2, 16) + index).requires_grad_()
        y = tilenorm.layer_norm(x, (16,))
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        return y.detach(), grad


@pytest.mark.parametrize("method", ["fork", *slow("spawn")])
def test_workers_of_a_data_loader(method):
    data = Normalized()
    expected = [data[i] for i in range(len(data))]  # what a forked worker remembers
    loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context=method)
    ys, grads = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert torch.equal(ys, torch.stack([y for y, _ in expected]))
    assert torch.equal(grads, torch.stack([g for _, g in expected]))
