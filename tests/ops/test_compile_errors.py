"""Kernels that do not compile: the reference serves, says why once, and fits what was saved."""

import pytest
import torch
from cuda.tile._cext import default_tile_context

import tilenorm
from tests.stand_in_compiler import CRASH, ERROR, HANG
from tilenorm.tools import explain, info

from .helpers import (
    EPS,
    FAMILY,
    assert_step,
    expected_of,
    incoming_of,
    messages,
    random,
    same,
    step,
    tensors_of,
)
from .pretended import GPU
from .test_concurrency import at_once

pytestmark = pytest.mark.usefixtures("no_memory")

N = 64
NAMED = "its kernel row_forward does not compile for sm_90: "
HOW = {
    "crash": (CRASH, "Return code -11"),
    "hang": (HANG, "`tileiras` compiler exceeded timeout 0.2s"),
    "error": (ERROR, "Return code 5 out of registers"),
}


def norm(rows=5, **options):
    return tilenorm.rms_norm(random(rows, N), (N,), random(N, seed=1), eps=EPS, **options)


@pytest.mark.parametrize("how", HOW)
def test_the_reference_serves_and_one_warning_names_the_kernel(how, compiler, told):
    command, words = HOW[how]
    compiler.breaks(row_forward=command)
    compiler.ends_after(0.2)
    for rows in (5, 5, 16, 1):
        assert torch.equal(norm(rows), norm(rows, backend="reference"))
    [message] = messages(told)
    assert message.startswith(f"tilenorm: reference runs instead of cutile: {NAMED}{words}")
    assert message.endswith("(for rms_norm of 64 float32)")
    assert compiler.runs("row_forward") == 1


def test_a_backend_that_was_asked_for_raises_what_the_compiler_said(compiler, told):
    compiler.breaks(row_forward=ERROR)
    reason = f"{NAMED}Return code 5 out of registers"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"^rms_norm: backend 'cutile' .* but {reason}"):
            norm(backend="cutile")
    assert messages(told) == []
    norm()
    assert len(messages(told)) == 1
    assert compiler.runs("row_forward") == 1


def test_other_specs_are_served_by_the_kernels(compiler, told):
    compiler.breaks(row_forward=ERROR)
    norm()
    compiler.breaks()
    tilenorm.layer_norm(random(5, N), (N,))
    assert compiler.runs("row_forward") == 2
    norm()  # the failed compilation is not tried again
    assert compiler.runs("row_forward") == 2
    assert len(messages(told)) == 1


def test_explain_says_why(compiler, told, monkeypatch):
    monkeypatch.setattr(explain, "device_of", lambda *_: GPU)
    compiler.breaks(row_forward=ERROR)
    arguments = random(5, N), (N,), random(N, seed=1)
    assert tilenorm.explain("rms_norm", *arguments).chosen == "cutile"
    norm()
    found = tilenorm.explain("rms_norm", *arguments)
    assert found.chosen == "reference"
    assert found.refused["cutile"].startswith(f"{NAMED}Return code 5 out of registers")


FORMS = {
    "rms_norm": "norm_backward",
    "add_layer_norm": "column_sum",
    "gated_rms_norm, gate first": "norm_backward",
    "gated_layer_norm": "norm_backward",
}


@pytest.mark.parametrize("name, kernel", FORMS.items(), ids=FORMS)
def test_the_reference_computes_gradients_of_what_the_kernels_computed(
    name, kernel, compiler, told
):
    form = FAMILY[name]
    tensors = tensors_of(form, 5, N, dtype=torch.float16, parameter=torch.float32)
    incoming = incoming_of(tensors)
    compiler.breaks(**{kernel: ERROR})
    found = step(form, tensors, incoming)
    assert (compiler.runs("row_forward"), compiler.runs(kernel)) == (1, 1)
    assert_step(found, expected_of(form, tensors, incoming))
    # From now on the reference serves both directions.
    expected = step(form, tensors, incoming, backend="reference")
    for _ in range(2):
        assert same(step(form, tensors, incoming), expected)
    assert (compiler.runs("row_forward"), compiler.runs(kernel)) == (1, 1)
    [message] = messages(told)
    assert f"its kernel {kernel} does not compile" in message


def test_a_kernel_that_fails_later(compiler, told):
    """Another number of rows may compile anew. Gradients of earlier results are still computed."""
    x, w = random(5, N).requires_grad_(), random(N, seed=1).requires_grad_()
    before = tilenorm.rms_norm(x, (N,), w, eps=EPS)
    compiler.breaks(row_forward=ERROR)
    assert torch.equal(norm(16), norm(16, backend="reference"))
    assert compiler.runs("row_forward") == 2
    grads = torch.autograd.grad(before.sum(), (x, w))
    torch.testing.assert_close(grads, torch.autograd.grad(norm_of(x, w).sum(), (x, w)))
    assert compiler.runs("norm_backward") == 0
    assert len(messages(told)) == 1


def norm_of(x, w):
    return tilenorm.rms_norm(x, (N,), w, eps=EPS, backend="reference")


def test_threads_that_meet_it_at_once(compiler, told):
    compiler.breaks(row_forward=f"sleep 0.3; {ERROR}")
    found, expected = at_once([norm] * 6), norm(backend="reference")
    assert all(torch.equal(y, expected) for y in found)
    assert compiler.runs("row_forward") == 1
    assert len(messages(told)) == 1


@pytest.mark.parametrize("kernel", ["row_forward", "norm_backward", None])
def test_info_shows_it(kernel, compiler, gpu_of_info, monkeypatch):
    monkeypatch.setattr(info, "NORMS", ("rms_norm", "add_rms_norm"))
    monkeypatch.setattr(info, "NOT_OF_ROWS", ())
    compiler.breaks(**({kernel: ERROR} if kernel else {}))
    lines, wrong = info.information()
    assert f"  rms_norm: {'reference' if kernel else 'cutile'}" in lines
    reason = f"its kernel {kernel} does not compile for sm_90: Return code 5 out of registers"
    assert wrong == ([reason] if kernel else [])
    assert (
        (f"    cutile refuses: {reason}" in lines) == (f"wrong: {reason}" in lines) == bool(kernel)
    )


def test_a_folder_for_temporary_files_that_is_gone(compiler, told, monkeypatch):
    monkeypatch.setattr(default_tile_context.config, "temp_dir", str(compiler.folder / "none"))
    norm()
    assert "No such file or directory" in messages(told)[0]
