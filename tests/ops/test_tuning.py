"""Tuning: wrong candidates are seen on the CPU; a GPU tunes, and serves what it found."""

from dataclasses import replace

import pytest
import torch

from tests import cases, interpreter
from tilenorm.__main__ import main
from tilenorm.launch import heuristics, user_table
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.candidates import candidates
from tilenorm.launch.config import Forward, Wide
from tilenorm.launch.tuner import plan_of
from tilenorm.ops import tuning
from tilenorm.ops.tuning import Trials, ordered_candidates, whole_rows
from tilenorm.spec import NormSpec

from .cuda_helpers import made, target, train
from .helpers import FAMILY, NEEDS_GPU, assert_within, expected_of

H200 = cases.target("sm_90")
SPECS = [
    NormSpec("rms", 40, "bfloat16", "bfloat16"),
    NormSpec("rms", 40, "float16", "float16", "float16", 1.0, rounding="early"),
    NormSpec("layer", 40, "bfloat16", "float32", "bfloat16", residual="float32"),
    NormSpec("rms", 40, "float32", "float32", gate="bfloat16"),
    NormSpec("rms", 40, "bfloat16", gate="bfloat16", gate_first=True),
    NormSpec("layer", 40, "bfloat16", "bfloat16", "bfloat16", heads=3),
]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=cases.label)
each_direction = pytest.mark.parametrize("direction", cases.DIRECTIONS)


def interpret(calls, index) -> None:
    for kernel, grid, arguments in calls:
        interpreter.launch(grid, kernel, arguments)


def trials(spec, direction, run=interpret) -> Trials:
    rows = whole_rows(spec, 48)
    return Trials(spec, direction, rows, rows, torch.device("cpu"), run)


@each_spec
@each_direction
def test_right_candidates_are_kept(spec, direction):
    tried = trials(spec, direction)
    for config in (*ordered_candidates(spec, H200, direction)[:2], Wide(32)):
        assert tried.wrong(plan_of(spec, H200, direction, config)) is None, config


@each_direction
def test_wrong_results_are_seen(direction):
    spec = SPECS[0]
    plan = plan_of(replace(spec, offset=0.1), H200, direction, Wide(32))
    assert "differs from the reference" in trials(spec, direction).wrong(plan)


@each_direction
def test_rows_that_are_not_written_are_seen(direction):
    def all_but_one(calls, index) -> None:
        outputs = ("Y", "DX")
        for kernel, grid, arguments in calls:
            interpreter.launch(grid, kernel, arguments)
            names = kernel._annotated_function.pysig.parameters
            for name, value in zip(names, arguments, strict=True):
                if name in outputs:
                    value[-1] = float("nan")

    spec = SPECS[0]
    plan = plan_of(spec, H200, direction, Wide(32))
    message = "result 0 differs from the reference in 40 places"
    assert trials(spec, direction, all_but_one).wrong(plan) == message


@each_direction
def test_what_serves_now_is_tried_first(direction):
    for hidden in (37, 64, 4096, 65536):
        spec = NormSpec("rms", hidden, "bfloat16", "bfloat16")
        tried = ordered_candidates(spec, H200, direction)
        chosen = cases.config(direction, spec, H200)
        assert tried[0] in (chosen, replace(chosen, **widths(tried[0])))
        assert len(tried) == len(set(tried))


def widths(config) -> dict:
    return {"widths": config.widths} if isinstance(config, Forward) else {}


def test_rows_are_whole_tokens():
    spec = SPECS[0]
    assert [whole_rows(spec, n) for n in (1, 16, 100)] == [16, 16, 96]
    assert [whole_rows(replace(spec, heads=3), n) for n in (1, 100)] == [48, 96]


@NEEDS_GPU
@pytest.mark.parametrize("op", ["rms_norm", "add_layer_norm"])
def test_tuning_a_gpu(op, tables, no_memory, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "candidates", lambda *a: candidates(*a)[:6])
    arguments = f"--op {op} --hidden 1024 --rows 4096 --seconds 2 --processes 1 --bias"
    assert main(["tune", *arguments.split()]) == 0
    arch = target().arch
    path = user_table.path_of(arch)
    found = {e.key.direction: e for e in user_table.read(path, arch)}
    assert set(found) == {"forward", "backward"}
    for entry in found.values():
        assert entry.gpu == torch.cuda.get_device_name()
        assert entry.us > 0 and entry.samples >= 3 and 0 < entry.gb_s < 50_000
        assert entry.driver and entry.registers
    assert "dropped" not in capsys.readouterr().err, "a candidate is wrong"

    spec = NormSpec.of(op, 1024, "bfloat16", weight="bfloat16", bias="bfloat16")
    assert heuristics.forward(spec, target()) == found["forward"].config
    assert heuristics.source(spec, target(), every_gradient(spec)) == f"user table {path}"
    tensors, incoming = made(FAMILY[op], 300, 1024)
    got, expected = train(FAMILY[op], tensors, incoming), expected_of(FAMILY[op], tensors, incoming)
    for name, result in got.items():
        assert_within(name, result, *expected[name], rows=300)


@NEEDS_GPU
def test_a_sample_is_the_time_of_a_call():
    spec = NormSpec("rms", 4096, "bfloat16", "bfloat16")
    config = heuristics.forward(spec, target())
    plan = plan_of(spec, target(), "forward", config)
    small, large = (
        Trials(spec, "forward", rows, 16, torch.device("cuda", 0)) for rows in (4096, 32768)
    )
    # The first of each compiles.
    times = [min(tried.sample(plan) for _ in range(10)) for tried in (small, large)]
    assert 4 < times[1] / times[0] < 12, times
