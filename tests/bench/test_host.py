"""``python -m bench host`` measures each way of each op, and prints what it measured."""

import pytest
import torch

from bench import host, record
from bench.cases import OPS
from bench.command import Run


@pytest.mark.slow
def test_the_command_measures_every_way(again, graphs, monkeypatch):
    op = "add_layer_norm"
    monkeypatch.setattr(host.timing, "host", lambda call, device: (call(), [3, 4])[1])
    written, out, _ = again(["host", "--op", op, "--provider", "torch", "tilenorm"])
    found = {(line.way, line.provider): line for line in written.hosts}
    names = ("torch", "tilenorm")
    steps = {("step", name) for name in (*names, "compile", "tilenorm-compile")}
    assert found.keys() == {(way, n) for way in ("call", "batch") for n in names} | steps
    for line in written.hosts:
        assert not line.error and (line.forward_us, line.forward_cpu_us) == (3, 4)
        assert (line.forward_backward_us, line.forward_backward_cpu_us) == (3, 4)
    for way in host.WAYS:
        assert f"{op}: host time of a {way} in µs (times torch's)" in out


def test_a_step_is_norms_with_products_by_either_way():
    leaves, grads, load = host._given(OPS["rms_norm"], "cpu", "step")
    outputs = [load(name)(*leaves) for name in ("torch", "tilenorm")]
    torch.testing.assert_close(*outputs, rtol=0.1, atol=0.1)
    assert outputs[0].shape == grads[0].shape and len(leaves[-1]) == host.NORMS


def test_a_batch_has_three_dimensions_and_whole_parameters():
    leaves, grads, _ = host._given(OPS["add_rms_norm"], "cpu", "batch")
    assert [x.dim() for x in leaves] == [3, 3, 1] and all(dy.dim() == 3 for dy in grads)
    assert all(x.is_leaf and x.requires_grad for x in leaves)
    (x, weight), grads, load = host._given(OPS["head_rms_norm"], "cpu", "batch")
    assert x.shape == grads[0].shape == (2, 16, 32, host.N) and weight.shape == (32, host.N)
    assert load("torch")(x, weight).shape == x.shape


def test_norms_by_group_are_called_with_a_sample_and_codes_have_a_forward_alone():
    leaves, *_ = host._given(OPS["modulated_rms_norm gated"], "cpu", "call")
    assert [list(x.shape) for x in leaves] == [[1, 1024, 1024]] * 2 + [[1, 1024]] * 3
    assert OPS["modulated_rms_norm"].ways == ("call", "step")
    assert OPS["rms_norm_quantized row"].ways == ("call",)
    course = Run("cpu", {}, record.Record(), print, lambda: False)
    (line,) = host.times(OPS["rms_norm_quantized row"], ["torch"], course, "call", print)
    assert line.forward_us and line.forward_backward_us is None and not line.error
