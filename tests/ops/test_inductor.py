"""What Inductor's generated code calls in place of the ops."""

import re
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import tilenorm
from tilenorm.ops import inductor

from .helpers import ADD, EACH_DEVICE, EACH_FORM, RMS, call, op_call, random, same, step, tensors_of

OPS = torch.ops.tilenorm
CALLS = "torch._inductor.codegen.custom_extern_kernel_codegen"


@EACH_DEVICE
@EACH_FORM
@pytest.mark.parametrize("grad", [False, True])
def test_inductor_calls_past_the_dispatcher(device, form, grad, dynamo):
    pytest.importorskip(CALLS, reason="PyTorch before 2.11")
    tensors = tensors_of(form, 3, 16, device=device)
    run = torch.compile(lambda tensors: call(form, tensors))
    with torch.set_grad_enabled(grad), torch._inductor.config.patch(force_disable_caches=True):
        if grad:
            compiled = partial(step, form, tensors, function=lambda _, tensors: run(tensors))
            got, codes = run_and_get_code(compiled)
            assert same(got, step(form, tensors))
        else:
            got, codes = run_and_get_code(run, tensors)
            assert all(map(torch.equal, got, call(form, tensors)))
    names = [form.op, "norm_backward"] if grad else [form.op]
    assert len(codes) == len(names)
    for code, name in zip(codes, names, strict=True):
        assert re.search(rf"buf\d+ = {name}_[0-9a-f]{{12}}\(", code)
        assert "= torch.ops.tilenorm" not in code


@EACH_DEVICE
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("grad", [False, True])
def test_inductor_calls_that_differ_in_their_tensors(device, grad, dynamo):
    """Each call finds the plan of its own tensors."""
    pytest.importorskip(CALLS, reason="PyTorch before 2.11")
    low, full = torch.bfloat16, torch.float32
    kinds = [(RMS, {"dtype": d, "parameter": p}) for d in (low, full) for p in (low, full)]
    kinds += [(ADD, {"dtype": d, "other": o}) for d in (low, full) for o in (low, full)]
    calls = [(form, tensors_of(form, 6, 64, device=device, **kind)) for form, kind in kinds]
    for form, given in (calls[0], calls[4]):
        for left in ("weight", "bias"):
            calls.append((form, {name: t for name, t in given.items() if name != left}))

    def norms(given):
        return [y for (form, _), t in zip(calls, given, strict=True) for y in call(form, t)]

    def run(function):
        given = [{n: t.clone() for n, t in tensors.items()} for _, tensors in calls]
        of = [t.requires_grad_(grad) for tensors in given for t in tensors.values()]
        outputs = function(given)
        grads = torch.autograd.grad(outputs, of, [*map(torch.ones_like, outputs)]) if grad else ()
        return *outputs, *grads

    compiled, expected = torch.compile(norms, fullgraph=True), run(norms)
    with torch._inductor.config.patch(force_disable_caches=True):
        got, codes = run_and_get_code(run, compiled)
    for results in (got, run(compiled)):
        assert all(map(torch.equal, results, expected))
    ops = ("(add_)?rms_norm", "norm_backward")
    for code, op in zip(codes, ops, strict=False):
        assert len(re.findall(rf"buf\d+ = {op}_[0-9a-f]{{12}}\(", code)) == len(calls)


@EACH_DEVICE
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lead", [(6,), (2, 3)], ids=str)
def test_inductor_calls_of_chains_and_quantised_norms(device, grad, lead, dynamo):
    pytest.importorskip(CALLS, reason="PyTorch before 2.11")
    shapes = [(*lead, 64)] * 2 + [(64,)] * 2
    leaves = [random(*s, device=device, seed=i).requires_grad_(grad) for i, s in enumerate(shapes)]

    def norms(x, residual, w, next_w):
        y, total = tilenorm.rms_norm_add_rms_norm(x, residual, (64,), w, next_w)
        q = tilenorm.add_layer_norm_quantized(
            x, residual, (64,), w, scaling="mx", return_output=True, return_amax=True
        )
        return y, total, q.output, q.residual_out, q.q.float(), q.scale.float(), q.amax

    def run(function):
        outputs = function(*leaves)
        dys = [*map(torch.ones_like, outputs[:4])]
        return *outputs, *(torch.autograd.grad(outputs[:4], leaves, dys) if grad else ())

    compiled, expected = torch.compile(norms, fullgraph=True), run(norms)
    with torch._inductor.config.patch(force_disable_caches=True):
        got, codes = run_and_get_code(run, compiled)
    for results in (got, run(compiled)):
        assert all(map(torch.equal, results, expected))
    for op in ("rms_norm_add_rms_norm", "add_layer_norm_quantized"):
        assert len(re.findall(rf"buf\d+ = {op}_[0-9a-f]{{12}}\(", codes[0])) == 1
    assert all("= torch.ops.tilenorm" not in code for code in codes)


@EACH_DEVICE
def test_inductor_calls_of_any_width(device, dynamo):
    pytest.importorskip(CALLS, reason="PyTorch before 2.11")
    run = torch.compile(lambda x: tilenorm.rms_norm(x, x.shape[-1:]), dynamic=True, fullgraph=True)
    x = random(5, 24, device=device)
    with torch._inductor.config.patch(force_disable_caches=True):
        got, (code,) = run_and_get_code(run, x)
    assert re.search(r"buf\d+ = torch\.ops\.tilenorm\.rms_norm\.default\(", code)
    with dynamo.config.patch(error_on_recompile=True):
        wide = random(5, 40, device=device)
        assert torch.equal(run(wide), tilenorm.rms_norm(wide, (40,)))
    assert torch.equal(got, tilenorm.rms_norm(x, (24,)))


@EACH_DEVICE
def test_inductor_asks_the_op_for_an_absent_result(device, dynamo):
    """Of a call that saves nothing, mean and rstd are empty tensors."""
    x = random(3, 16, device=device)
    run = torch.compile(partial(op_call, "layer_norm", hidden=16, save=False), fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        got, expected = run({"input": x}), op_call("layer_norm", {"input": x}, 16, save=False)
    assert all(torch.equal(got[name], t) for name, t in expected.items())


def test_code_that_another_version_has_generated_is_not_found(tmp_path, monkeypatch, dynamo):
    pytest.importorskip(CALLS, reason="PyTorch before 2.11")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, found = random(3, 16), []
    with torch.compiler.config.patch(cache_key_tag="a user's"):
        for generation in ("one", "one", "another"):
            monkeypatch.setattr(inductor, "_generation", lambda tag=generation: f" {tag}")
            torch._dynamo.reset()
            counters.clear()
            run = torch.compile(lambda x: tilenorm.rms_norm(x, (16,)) + 1, fullgraph=True)
            assert torch.equal(run(x), tilenorm.rms_norm(x, (16,)) + 1)
            found.append("fxgraph_cache_hit" in counters["inductor"])
        assert torch.compiler.config.cache_key_tag == "a user's one another"
    assert found == [False, True, False]
