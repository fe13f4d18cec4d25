"""``python -m bench host`` measures each way of each op, and prints what it measured."""

from itertools import cycle

import pytest

from bench import host


@pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
def test_the_command_takes_the_least_of_the_rounds_of_every_way(again, graphs, monkeypatch):
    monkeypatch.setattr(host, "N", 64)
    monkeypatch.setattr(host, "STEP_N", 32)
    monkeypatch.setattr(host, "NORMS", 2)
    rounds: dict = {}

    def timed(call, device):
        call()
        return next(rounds.setdefault((call.func, call.args[0]), cycle([9, 3, 5]))), 4

    monkeypatch.setattr(host.timing, "host", timed)
    names = ["torch", "tilenorm"]
    ops = ["add_layer_norm", "head_rms_norm"]
    written, out, _ = again(["host", "--op", *ops, "--provider", *names])
    asked = [(way, name) for way in host.WAYS for name in names]
    asked += [("step", name) for name in ("compile", "tilenorm-compile")]
    found = {(line.op, line.way, line.provider) for line in written.hosts}
    assert found == {(op, *each) for op in ops for each in asked}
    for line in written.hosts:
        assert not line.error and (line.forward_us, line.forward_cpu_us) == (3, 4)
        assert (line.forward_backward_us, line.forward_backward_cpu_us) == (3, 4)
        assert f"{line.op}: host time of a {line.way} in µs (times torch's)" in out
