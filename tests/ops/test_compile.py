"""torch.compile: one graph for any number of rows, the bits of eager calls, and what Inductor's
generated code calls in place of the ops.
"""

import re
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import tilenorm
from tests.support.calls import (
    ADD,
    CALLS,
    call,
    incoming_of,
    op_call,
    random,
    same,
    slow,
    step,
    tensors_of,
)
from tests.support.quantized import bits
from tests.support.uses import USES, Use
from tilenorm.ops.torch_ops import inductor
from tilenorm.table import OPS, QUANTIZED_NORMS

OPTIONS = {"offset": 1.0}
B, F32 = torch.bfloat16, torch.float32


def compiled(form, device, function=call, dynamic=True, **options):
    """The function compiled for any number of rows, and the backend, which counts compilations:
    inductor, where it needs no C++ compiler.
    """
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")
    run = torch.compile(
        lambda tensors: function(form, tensors, **options),
        fullgraph=True,
        dynamic=dynamic,
        backend=counter,
    )
    return (lambda _, tensors: run(tensors)), counter


CASES = [("rms_norm", True), ("layer_norm", None), ("add_rms_norm, two residuals", True)]
CASES += slow(("gated_rms_norm, gate first", True), ("add_layer_norm, masked and scaled", True))


@pytest.mark.parametrize("name, dynamic", CASES)
def test_compiled_the_same_bits_without_recompiling(device, name, dynamic, dynamo):
    """Left to itself, PyTorch takes the second batch size to tell which dimension varies."""
    form = CALLS[name]
    function, counter = compiled(form, device, dynamic=dynamic, **OPTIONS)
    counts = []
    for rows in (3, 16, 17, 1000):
        tensors = tensors_of(form, rows, 1001, dtype=B, parameter=F32, device=device)
        first = rows == 3 or (rows == 16 and not dynamic)
        with dynamo.config.patch(error_on_recompile=not first):
            got = step(form, tensors, function=function)
        expected = step(form, tensors, **OPTIONS)
        if device == "cuda":  # where Inductor adds up the products of which this gradient is made
            for results in (got, expected):
                results.pop("layer_scale", None)
        assert same(got, expected), rows
        counts += [counter.frame_count] * (not first or dynamic is True)
    # One, or two where PyTorch first takes eps and offset for numbers that vary.
    assert len(set(counts)) == 1
    assert not dynamo.utils.counters["graph_break"]


def test_compiled_with_one_gradient_absent(device, dynamo):
    tensors = tensors_of(ADD, 5, 40, dtype=B, other=F32, device=device)
    function, (dy, dsum) = compiled(ADD, device)[0], incoming_of(tensors)
    for incoming in ((None, dsum), (dy, None)):
        got, expected = (step(ADD, tensors, incoming, function=f) for f in (function, call))
        # A compiled backward pass sees zeros, not None, where an output is not used.
        assert got.keys() >= expected.keys()
        assert all(torch.equal(got[n], expected[n]) for n in expected)
        assert not any(got[n].any() for n in got.keys() - expected.keys())


SOME = ("rms_norm", "add_layer_norm", "add_rms_norm_quantized", "layer_norm_add_layer_norm")
# No vectors: to find out which a processor has, Inductor calls the C++ compiler for seconds.
CONFIG = partial(
    torch._inductor.config.patch, {"force_disable_caches": True, "cpp.vec_isa_ok": False}
)
CODEGEN = "torch._inductor.codegen.custom_extern_kernel_codegen"


def calls_of(device, every: bool) -> list[tuple[str, Use, dict[str, Tensor]]]:
    """Ops with tensors of several dtypes. test_library.py has options and absent tensors."""
    found = []
    for op, dtypes in product(OPS if every else SOME, ((B, B), (F32, B))):
        if op not in QUANTIZED_NORMS or dtypes[0] == B:
            found.append((op, USES[op], USES[op].tensors(dtypes, device)))
    scaled = USES["add_rms_norm"]._replace(parameters=("weight", "layer_scale"))
    return [*found, ("add_rms_norm", scaled, scaled.tensors((B, B), device))]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("every", [False, *slow(True)])
def test_inductor_calls_past_the_dispatcher(device, every, dynamo):
    """Each call of a graph finds the plan of its own tensors."""
    pytest.importorskip(CODEGEN, reason="PyTorch before 2.11")
    calls = calls_of(device, every)

    def norms(given):
        outputs = []
        for (_, use, _), tensors in zip(calls, given, strict=True):
            function, rows = use.bound(tensors)
            outputs.extend(function(*rows).values())
        return outputs

    def run(function):
        given = [{n: t.detach().clone() for n, t in tensors.items()} for *_, tensors in calls]
        of = [t.requires_grad_() for tensors in given for t in tensors.values()]
        outputs = function(given)
        used = [y for y in outputs if y.requires_grad]
        grads = torch.autograd.grad(used, of, [*map(torch.ones_like, used)])
        return *outputs, *grads

    compiled, expected = torch.compile(norms, fullgraph=True), run(norms)
    with CONFIG():
        got, codes = run_and_get_code(run, compiled)
    for results in (got, run(compiled)):
        for one, other in zip(results, expected, strict=True):
            assert one.stride() == other.stride() and torch.equal(bits(one), bits(other))
    for op in OPS:
        calls_of_op = re.findall(rf"buf\d+ = {op}_[0-9a-f]{{12}}\(", codes[0])
        assert len(calls_of_op) == sum(op == other for other, *_ in calls)
    assert all("= torch.ops.tilenorm" not in code for code in codes)
    backward = r"buf\d+ = (?:(?:modulated_)?norm|rms_norm_rope)_backward_"
    assert len(re.findall(backward, codes[1])) >= len(calls)


def test_inductor_calls_of_any_width(device, dynamo):
    pytest.importorskip(CODEGEN, reason="PyTorch before 2.11")
    run = torch.compile(lambda x: tilenorm.rms_norm(x, x.shape[-1:]), dynamic=True, fullgraph=True)
    x = random(5, 24, device=device)
    with CONFIG():
        got, (code,) = run_and_get_code(run, x)
    assert re.search(r"buf\d+ = torch\.ops\.tilenorm\.rms_norm\.default\(", code)
    with dynamo.config.patch(error_on_recompile=True):
        wide = random(5, 40, device=device)
        assert torch.equal(run(wide), tilenorm.rms_norm(wide, (40,)))
    assert torch.equal(got, tilenorm.rms_norm(x, (24,)))


def test_inductor_asks_the_op_for_an_absent_result(device, dynamo):
    """Of a call that saves nothing, mean and rstd are empty tensors."""
    x = random(3, 16, device=device)
    run = torch.compile(partial(op_call, "layer_norm", hidden=16, save=False), fullgraph=True)
    with CONFIG():
        got, expected = run({"input": x}), op_call("layer_norm", {"input": x}, 16, save=False)
    assert all(torch.equal(got[name], t) for name, t in expected.items())


def test_code_that_another_version_has_generated_is_not_found(tmp_path, monkeypatch, dynamo):
    pytest.importorskip(CODEGEN, reason="PyTorch before 2.11")
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
