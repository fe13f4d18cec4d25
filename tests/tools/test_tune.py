"""Tuning: wrong candidates are seen on the CPU; a GPU tunes, and serves what it found."""

from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch

from tests.support import cases
from tests.support.calls import FAMILY, NEEDS_GPU, assert_step, expected_of, slow
from tests.support.executors import Interpreter, arguments_of
from tests.support.on_gpu import made, target, train
from tilenorm.__main__ import main
from tilenorm.launch import heuristics, user_table
from tilenorm.launch.calls import bound, every_gradient
from tilenorm.launch.config import Backward, Hints, RowForward, SharedForward
from tilenorm.launch.target import Target
from tilenorm.launch.toolchain import CompileError
from tilenorm.spec import NormSpec, Rotation
from tilenorm.tools import tune as tuning
from tilenorm.tools.candidates import Search, explicit
from tilenorm.tools.tune import How, Trials, plan_of, whole_rows

H200 = cases.target("sm_90")
SPECS = [
    NormSpec("rms", 40, "bfloat16", "bfloat16"),
    NormSpec("rms", 40, "float16", "float16", "float16", 1.0, rounding="early"),
    NormSpec("layer", 40, "bfloat16", "float32", "bfloat16", residual="float32", addend="bfloat16"),
    NormSpec("rms", 40, "float32", "float32", gate="bfloat16"),
    NormSpec("rms", 40, "bfloat16", gate="bfloat16", gate_first=True),
    NormSpec("layer", 40, "bfloat16", "bfloat16", "bfloat16", heads=3),
]
B = "bfloat16"
MODULATED = NormSpec("layer", 40, B, B, B, residual=B, mod_scale=B, mod_shift=B, mod_gate=B)
SHARED = {"forward": SharedForward(Hints(), (32,)), "backward": Backward((32,))}  # two blocks a row
interpret = Interpreter("sm_90").run()
each_direction = pytest.mark.parametrize("direction", cases.DIRECTIONS)


def trials(search, run=interpret) -> Trials:
    rows = whole_rows(search.spec, 48)
    return Trials(search, rows, rows, torch.device("cpu"), run)


def rotated(heads: int) -> NormSpec:
    """Heads with a norm of each, or, of several, with one of all heads of a token."""
    hidden, of_key = 24 * heads, {"key": B, "key_weight": B, "key_hidden": 24 * heads * (heads > 1)}
    return NormSpec("rms", hidden, B, B, rotation=Rotation(16, 24, heads > 1), **of_key)


@pytest.mark.parametrize(
    "spec, direction, terms",
    [
        *zip(SPECS, cycle(cases.DIRECTIONS), (1, 3, 1, 1, 1, 1), strict=False),
        (rotated(1), "forward", 1),
        *slow((rotated(3), "backward", 1)),
        (MODULATED, "backward", 1),
    ],
    ids=cases.label,
)
def test_right_candidates_are_kept(spec, direction, terms):
    search = Search(spec, H200, direction, terms)
    tried = trials(search)
    alone = spec.rotation or spec.modulated  # no blocks share such rows
    for config in (search.configs[0], *(search.configs[5::60] if alone else [SHARED[direction]])):
        plan = plan_of(search, config)
        assert plan.needs.terms == terms if direction == "backward" else plan.save
        assert tried.wrong(plan) is None, config


def test_the_key_of_modulated_rows():
    found = Search(MODULATED, H200, "backward").key()
    assert found.op == "modulated_layer_norm by bfloat16, a gate, 2 sums over all rows"


def changed(change, launches, arrays, index) -> None:
    """Launch, and change what is written."""
    interpret(launches, arrays, index)
    for call in bound(launches, arrays):
        for name, value in arguments_of(call).items():
            if name in ("Y", "DX") and isinstance(value, torch.Tensor):
                change(value)


def lose_the_last_row(rows) -> None:
    rows[-1] = float("nan")


def move_the_smallest(rows) -> None:
    """By less than the rounding of the largest number."""
    at = rows.abs().flatten().argmin()
    rows.view(-1)[at] += rows.abs().max() / 100


@pytest.mark.parametrize("direction", ["forward", *slow("backward")])
def test_wrong_results_are_seen(direction):
    search = Search(SPECS[0], H200, direction)
    other = replace(search, spec=replace(SPECS[0], offset=0.1))
    right, wrong = (plan_of(s, SHARED[direction]) for s in (search, other))
    assert "differs from the reference" in trials(search).wrong(wrong)
    for change, places in ((lose_the_last_row, 40), (move_the_smallest, 1)):
        told = f"result 0 differs from the reference in {places} places"
        assert trials(search, partial(changed, change)).wrong(right) == told


def test_a_norm_that_is_rounded_before_an_addition():
    """The sum may be small where the norm is not, and differ by the norm's rounding."""
    for skip, told in (
        ("bfloat16", None),
        (None, "result 0 differs from the reference in 1 places"),
    ):
        spec = NormSpec("layer", 256, "bfloat16", "bfloat16", "bfloat16", skip=skip)
        search = Search(spec, H200, "forward")
        plan = plan_of(search, search.configs[0])
        assert trials(search, partial(changed, move_the_smallest)).wrong(plan) == told


@each_direction
@pytest.mark.parametrize("hidden", [37, 4096, 65536])
def test_what_serves_now_is_tried_first(direction, hidden):
    spec, target = NormSpec("rms", hidden, "bfloat16", "bfloat16"), Target.of("sm_90")
    first, *others = Search(spec, target, direction).configs
    assert first == explicit(cases.config(direction, spec, target), hidden)
    assert others and len({first, *others}) == 1 + len(others)


def test_rows_are_whole_tokens():
    spec = SPECS[0]
    assert [whole_rows(spec, n) for n in (1, 16, 100)] == [16, 16, 96]
    assert [whole_rows(replace(spec, heads=3), n) for n in (1, 100)] == [48, 96]


SPEC = NormSpec("rms", 256, "bfloat16", "bfloat16")


@pytest.fixture
def pretended(tables, monkeypatch):
    """A GPU of `times` µs by the rows of a tile; those of 16 are wrong, those of 1 do not run."""
    times = {1: 50.0, 2: 90.0, 4: 70.0, 8: 80.0, 16: 60.0}

    class Pretended:
        bytes, sampled = 70_000_000, []

        def __init__(self, search, rows, checked, device):
            assert checked <= rows and device.type == "cuda"

        def wrong(self, plan):
            if plan.config.rows == 1:
                raise RuntimeError("invalid argument")
            return "it differs" if plan.config.rows == 16 else None

        def sampler(self, plan):
            def sample():
                self.sampled.append(plan.config)
                return times[plan.config.rows]

            return sample

    def candidates(search):
        kind = {"forward": RowForward, "backward": Backward}[search.direction]
        return [kind(rows=rows, widths=(256,)) for rows in times]

    monkeypatch.setattr(tuning, "Trials", Pretended)
    monkeypatch.setattr(Search, "candidates", candidates)
    monkeypatch.setattr(tuning, "driver_release", lambda: "580")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 36, 1 << 36))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    return Pretended


@pytest.mark.parametrize("direction, terms", [("forward", 1), *slow(("backward", 2))])
def test_the_fastest_right_candidate_is_found(direction, terms, pretended):
    told = []
    search = Search(SPEC, H200, direction, terms)
    found = tuning.tune(search, How(seconds=5, processes=1, report=told.append))
    assert (found.config.rows, found.config.widths) == (4, (256,))
    assert found.key == user_table.Key(direction, "rms_norm", 2, 256, True, False, terms)
    assert (found.us, found.spread, found.gb_s) == (70.0, 0.0, 1000.0)
    assert found.rows == tuning.ELEMENTS // 256
    assert (found.gpu, found.driver, found.samples >= 3) == ("a GPU", "580", True)
    assert found.spec.endswith(", 2 terms of dy") == (terms > 1)
    kernel = {"forward": "row_forward", "backward": "norm_backward"}[direction]
    assert kernel in found.registers
    dropped = [line.partition(": ")[2] for line in told if line.startswith("dropped ")]
    assert dropped == ["does not run: invalid argument", "it differs"]
    assert told[0] == "compiled 6 of 6"
    assert any(line.startswith("70.00 µs; before, 80.00 µs by ") for line in told)


def test_first_samples_do_not_count(pretended, monkeypatch):
    rank, sampled = tuning.rank, pretended.sampled

    def ranked(configs, *rest):
        assert sampled == configs and len(configs) > 1
        return rank(configs, *rest)

    monkeypatch.setattr(tuning, "rank", ranked)
    tuning.tune(Search(SPEC, H200, "forward"), How(seconds=5, processes=1))
    assert len(sampled) > len(set(sampled))


def does_not_compile(call, arch):
    raise CompileError("this kernel")


NOTHING = {
    "no candidate gives the reference's results": lambda patch: patch.setattr(
        tuning.Trials, "wrong", lambda self, plan: "it differs"
    ),
    "rms_norm 256: does not compile: this kernel": lambda patch: patch.setattr(
        tuning, "compile_call", does_not_compile
    ),
    "too short to time anything": lambda patch: None,
}


@pytest.mark.parametrize("message", NOTHING)
def test_why_nothing_was_found(message, pretended, monkeypatch):
    NOTHING[message](monkeypatch)
    with pytest.raises(RuntimeError, match=message):
        tuning.tune(Search(SPEC, H200, "forward"), How(seconds=0.0, processes=1))


@NEEDS_GPU
@pytest.mark.parametrize(
    "op, hidden", [("rms_norm", 1024), ("add_layer_norm", 1024), ("layer_norm", 65536)]
)
def test_tuning_a_gpu(op, hidden, tables, no_memory, monkeypatch, capsys):
    every = Search.candidates
    monkeypatch.setattr(Search, "candidates", lambda search: every(search)[:6])
    arguments = f"--op {op} --hidden {hidden} --rows 4096 --seconds 2 --processes 1 --bias"
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

    spec = NormSpec.of(op, hidden, "bfloat16", weight="bfloat16", bias="bfloat16")
    assert heuristics.chosen(spec, target()) == found["forward"].config
    assert heuristics.source(spec, target(), every_gradient(spec)) == f"user table {path}"
    tensors, incoming = made(FAMILY[op], 300, hidden)
    got = train(FAMILY[op], tensors, incoming)
    assert_step(got, expected_of(FAMILY[op], tensors, incoming))


@NEEDS_GPU
def test_a_sample_is_the_time_of_a_call():
    search = Search(NormSpec("rms", 4096, "bfloat16", "bfloat16"), target(), "forward")
    plan = plan_of(search, search.configs[0])
    small, large = (Trials(search, rows, 16, torch.device("cuda", 0)) for rows in (4096, 32768))
    samplers = [tried.sampler(plan) for tried in (small, large)]
    times = [min(sample() for _ in range(10)) for sample in samplers]
    assert 4 < times[1] / times[0] < 12, times
