"""``python -m bench host`` measures each way of each op, and prints what it measured."""

import sys
from itertools import cycle
from types import ModuleType

import pytest

import tilenorm.ops
from bench import beside, cold, host, provenance, turns
from bench.record import Turns
from tests.support.calls import slow

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
NAMES = ["torch", "tilenorm"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"N": 64, "STEP_N": 32, "NORMS": 2}.items():
        monkeypatch.setattr(host, name, value)
    monkeypatch.setattr(turns, "WARM_UP", 1)


def test_the_command_takes_the_least_of_the_rounds_of_every_way(again, graphs, monkeypatch):
    rounds: dict = {}

    def timed(call, device):
        call()
        us = next(rounds.setdefault((call.func, call.args[0]), cycle([9, 3, 5])))
        return {"us": us, "cpu_us": 4, "spread": us / 100}

    monkeypatch.setattr(host.timing, "host", timed)
    ops, ways = ["add_layer_norm", "head_rms_norm"], ["call", "step"]
    written, out, _ = again(["host", "--op", *ops, "--provider", *NAMES, "--way", *ways])
    asked = [(way, name) for way in ways for name in NAMES]
    asked += [("step", name) for name in ("compile", "tilenorm-compile")]
    found = {(line.op, line.way, line.provider) for line in written.hosts}
    assert found == {(op, *each) for op in ops for each in asked}
    for line in written.hosts:
        assert not line.error and (line.forward_us, line.forward_cpu_us) == (3, 4)
        assert (line.forward_grad_us, line.forward_grad_cpu_us) == (3, 4)
        assert (line.forward_backward_us, line.forward_backward_cpu_us) == (3, 4)
        assert line.spread == 0.03 and line.path == "python"
        assert f"{line.op}: host time of a {line.way} in µs (times torch's)" in out


@pytest.mark.parametrize("op", ["add_rms_norm", *slow("modulated_layer_norm gated")])
def test_other_work_precedes_each_phase_of_a_call_in_the_cold(again, monkeypatch, without_gpu, op):
    done, work = [], cold.Cold._other_work

    def counted(self):
        done.append(self.provider)
        work(self)

    monkeypatch.setattr(cold.Cold, "_other_work", counted)
    command = ["host", "--op", op, "--provider", *NAMES, "liger", "--way", "cold", "--rounds", "6"]
    written, out, _ = again(command)
    assert "absent: liger (needs a GPU)" in out
    assert [line.provider for line in written.turns] == NAMES
    assert len(done) == len(NAMES) * 3 * (turns.WARM_UP + 6)
    for line in written.turns:
        *phases, whole = line.us.values()
        assert [*line.us] == ["forward without grad", "forward", "backward", "forward and backward"]
        assert len(whole) == 6 and not line.error
        assert whole == pytest.approx([a + b for a, b in zip(*phases[1:], strict=True)], abs=0.02)


@pytest.mark.slow
def test_all_variants_of_a_step_run_in_one_process_over_the_same_weights(
    again, graphs, inline, liger, without_gpu
):
    written, out, _ = again(["host", "--way", "model", "--rounds", "2"])
    models = [label.split("'s form")[0] for label in dict.fromkeys(x.label for x in written.turns)]
    assert models == [*host.steps.SIZES]
    for line in written.turns:
        assert not line.error, line
        assert [*line.us] == ["forward", "backward", "optimizer", "step"]
        assert {len(us) for us in line.us.values()} == {2}
        assert line.norms == 5 and line.path == "python"
    assert {line.provider for line in written.turns} == {*host.steps.VARIANTS}
    assert out.count("training steps in ms, median (least) of 2 rounds, python") == len(models)


@pytest.mark.parametrize("options", [[], ["--max-seconds", "-1"]])
def test_variants_that_are_absent_fail_or_are_late_are_shown(
    monkeypatch, inline, without_gpu, again, options
):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setattr(tilenorm.RMSNorm, "forward", lambda self, x: x * self.weight)
    command = ["host", "--way", "model", "--model", "Llama 3.2 1B", "--rounds", "2"]
    written, out, _ = again([*command, "--variant", "eager", "modules", "liger", *options])
    _, modules, liger = written.turns
    assert liger.error.startswith("absent: ModuleNotFoundError: ")
    assert modules.error.startswith("out of time" if options else "ValueError: the gradient of ")
    assert [bool(line.us) for line in written.turns] == [not options, False, False]
    assert all(f"{line.provider}: {line.error}" in out for line in (modules, liger))


def test_every_sampler_is_first_in_turn_and_one_that_fails_is_left_out():
    made, failing = [], iter((1.0, 2.0))
    samplers = {
        "a": lambda: made.append("a") or {"whole": 1.0},
        "b": lambda: made.append("b") or {"whole": next(failing)},
        "c": lambda: made.append("c") or {"whole": 3.0},
    }
    found = turns.taken(samplers, 4, lambda: False)
    assert "".join(made) == "cababcbcacaac"
    assert found["a"] == {"us": {"whole": [1.0] * 4}}
    assert found["b"] == {"error": "StopIteration"}
    assert turns.taken(samplers, 4, lambda: True)["c"] == {"us": {}}


def test_losses_are_first_and_each_path_has_a_base_of_its_own():
    def line(path, name, *whole):
        return Turns("model", "M", "eager", name, 2, {"step": [*whole]}, path)

    python = line("python", "eager", 10.0, 20.0), line("python", "patch", 9.0, 19.0)
    native = line("native", "eager", 10.0, 20.0), line("native", "patch", 14.0, 26.0)
    pairs = beside.losses_first([*python, *native])
    assert pairs[0] == native[::-1]
    assert pairs[-1] == python[::-1]
    table = beside.listed([*python, *native])
    assert [row[3:] for row in table.rows] == [
        ["patch", "0.01 → 0.02 ms", "+2.5", "1.350 (too few rounds)"],
        ["patch", "0.01 → 0.01 ms", "-0.5", "0.925 (too few rounds)"],
    ]


def test_path_is_what_the_native_module_says(monkeypatch):
    assert provenance.host_path() == "python"
    native = ModuleType("tilenorm.ops.passes.native")
    native.describe = lambda: "C++, driver's launches"
    monkeypatch.setitem(sys.modules, native.__name__, native)
    assert provenance.host_path() == "C++, driver's launches"
