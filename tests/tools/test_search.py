"""The search: which candidates there are, what it compiles, what it drops, and that it finds the
fastest under noise.
"""

import random
from dataclasses import replace
from random import Random

import pytest

from tests.launch.test_heuristics import check
from tests.support import cases
from tilenorm.launch import heuristics
from tilenorm.launch.config import (
    Backward,
    Hints,
    RopeForward,
    RowForward,
    Served,
    SharedForward,
    StreamForward,
    cdiv,
)
from tilenorm.launch.target import MULTIPROCESSORS, Target
from tilenorm.spec import NormSpec
from tilenorm.tools.candidates import Search
from tilenorm.tools.dev.digests import rotations
from tilenorm.tools.precompile import Compiled
from tilenorm.tools.tune import (
    MOST_SAMPLES,
    Candidate,
    How,
    compile_candidates,
    prune,
    rank,
)

H200 = Target.of("sm_90")


def candidate(rows: int, code: str = "", together: int = 1, **given) -> Candidate:
    usual = {"registers": 64, "spill_bytes": 0, "shared_bytes": 1024, "threads": 128}
    usual |= {"kernel": "row_forward", "hints": "", "seconds": 0.1, "code": code or str(rows)}
    return Candidate(RowForward(rows), (Compiled(**usual | given),), ((100,),), together)


LARGE = candidate(1, shared_bytes=228 * 1024)
FAILED = Candidate(RowForward(8), failed="does not compile: because")
SPILLING = [candidate(1, spill_bytes=8), candidate(2), candidate(4, spill_bytes=200)]
WAITING = candidate(1, registers=128, together=5)
# (the candidates, the options of prune, the rows of those that are timed, why others are not)
PRUNED = [
    (SPILLING, {}, [1, 2], "spills 200 bytes"),
    (SPILLING, {"spilled": 0, "keep": RowForward(4)}, [2, 4], "spills 8 bytes"),
    # Where all spill, the least spilling stay.
    ([candidate(1, spill_bytes=800), candidate(2, spill_bytes=600)], {}, [2], "spills 800 bytes"),
    # What would spill least is no measure if it cannot run.
    ([LARGE, candidate(2, spill_bytes=900)], {}, [2], "1 × 233472 shared bytes, of 232448"),
    ([candidate(1, shared_bytes=227 * 1024)], {}, [1], ""),
    ([candidate(1, registers=255, threads=384)], {}, [], "1 × 97920 registers a block, of 65536"),
    ([FAILED, candidate(1)], {}, [1], "does not compile: because"),
    # Blocks that wait for others.
    ([WAITING, candidate(2)], {}, [2], "5 × 16384 registers a block"),
    ([WAITING, candidate(2)], {"keep": RowForward(1)}, [1, 2], ""),
    ([replace(WAITING, together=4)], {}, [1], ""),
    ([candidate(1, registers=128, together=5, kernel="column_sum")], {}, [1], ""),
    ([candidate(1, shared_bytes=64 * 1024, together=4)], {}, [], "4 × 65536 shared bytes"),
    # The same code is timed once.
    ([candidate(1, "a"), candidate(2, "a"), candidate(4, "b")], {}, [1, 4], "same code as RowForw"),
    ([candidate(1, "a"), replace(candidate(2, "a"), grids=((50,),))], {}, [1, 2], ""),
]


@pytest.mark.parametrize("candidates, how, timed, why", PRUNED)
def test_what_is_dropped(candidates, how, timed, why):
    reasons = prune(candidates, H200, **how)
    assert list(reasons) == [c.config for c in candidates]
    assert [config.rows for config, reason in reasons.items() if reason is None] == timed
    assert why in " ".join(filter(None, reasons.values()))


@pytest.mark.parametrize(
    "kernel, config, together",
    [
        ("shared_forward", SharedForward(Hints(6), (8192,), packed=True), 1),
        ("norm_backward", Backward((2048,), hints=Hints(4, 8), packed=True), 4),
    ],
)
def test_compiling_blocks_that_share_rows(kernel, config, together):
    search = Search(NormSpec("rms", 65536, "bfloat16", "bfloat16"), H200, config.direction)
    (found,) = compile_candidates(search, 64, [config], How(processes=1))
    assert found.failed is None and found.together == together
    assert [k.kernel for k in found.kernels[:2]] == ["clear_slots", kernel]
    assert prune([found], H200) == {config: None}


class FakeGpu:
    """Times choices by name, with noise, on a clock that a sample moves by a millisecond."""

    def __init__(self, times: dict[str, float], noise: float, seed: int = 0):
        self.times, self.noise, self.now = times, noise, 0.0
        self.random = random.Random(seed)
        self.taken = dict.fromkeys(times, 0)

    def sample(self, name: str) -> float:
        self.now += 1e-3
        self.taken[name] += 1
        return self.times[name] * (1 + self.noise * self.random.random())

    def rank(self, seconds: float = 60.0):
        return rank(list(self.times), self.sample, seconds, lambda _: None, lambda: self.now)


def test_finds_the_fastest_under_noise():
    # Noise of 5% hides the 1% between neighbours in single samples.
    names = [f"config {i}" for i in range(60)]
    for seed in range(10):
        order = random.Random(seed).sample(names, len(names))
        gpu = FakeGpu({n: 100 * 1.01**i for i, n in enumerate(order)}, 0.05, seed)
        ranking = gpu.rank()
        assert [n for n, _ in ranking[:2]] in (order[:2], [order[0], order[2]])
        assert len(ranking) == len(names)
        assert gpu.taken[order[0]] > 10 * gpu.taken[order[-1]], "slow ones take the time"


def test_what_is_clearly_fastest_is_soon_found():
    gpu = FakeGpu({"a": 100, "b": 50, "c": 100}, 0.01)
    (first, measured), *_ = gpu.rank()
    assert first == "b" and measured.samples < 20
    assert 50 <= measured.us <= 50.5 and 0 < measured.spread_us < 0.5


def test_equals_end_after_enough_samples():
    gpu = FakeGpu({"a": 100, "b": 100}, 0.05)
    assert all(MOST_SAMPLES <= m.samples <= 2 * MOST_SAMPLES for _, m in gpu.rank())


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05, 0.2])
def test_stops_in_time(seconds):
    gpu = FakeGpu({f"config {i}": 100 + i for i in range(30)}, 0.05)
    ranking = gpu.rank(seconds)
    assert gpu.now <= seconds + 1e-3
    assert len(ranking) == sum(n > 0 for n in gpu.taken.values())
    fastest = ranking[0][1] if seconds else None
    assert all(fastest.us <= m.us for _, m in ranking if m.samples >= fastest.samples)


@pytest.mark.parametrize("direction", cases.DIRECTIONS)
@pytest.mark.parametrize("seed", range(10))
def test_drawn_candidates_can_serve_and_are_few(seed, direction):
    rng = Random(seed)
    for _ in range(15):
        dtype, hidden = rng.choice(cases.DTYPES), rng.choice(cases.HIDDEN)
        spec = NormSpec(hidden=hidden, dtype=dtype, **rng.choice(cases.variants(dtype)))
        target = Target.of(rng.choice(list(MULTIPROCESSORS)))
        found = Search(spec, target, direction).candidates()
        # With heads, more blocks share a token's rows than some GPUs hold at once.
        assert (spec.heads or found) and len(found) == len(set(found)) < 512
        for config in found:
            check_candidate(config, spec, target)


@pytest.mark.parametrize("direction", cases.DIRECTIONS)
def test_candidates_of_rotated_heads_hold_what_the_rules_choose(direction):
    for dtype in cases.DTYPES:
        for spec in rotations(dtype):
            search = Search(spec, Target.of("sm_90"), direction)
            found = search.candidates()
            assert heuristics.chosen(spec, search.target, search.needs) in found
            assert len(found) == len(set(found)) < 512
            assert {config.direction for config in found} == {direction}


def check_candidate(config, spec, target):
    check(config, spec, target)
    assert spec.weight or not (config.reread or config.fetch)
    if config.together > 1:
        # The weights of wider segments are read one segment at a time, each before its store.
        vector = 16 // spec.widest_item * 32 * (config.hints.num_worker_warps or 4)
        assert (spec.weight or spec.bias) and config.widths[0] == vector
    if config.direction == "backward" and cases.shares(config, spec.hidden):
        sharing = cdiv(spec.hidden, sum(config.widths)) * (spec.heads or 1)
        assert sharing <= target.multiprocessors * config.hints.occupancy
    if config.direction == "backward" and spec.heads and config.rows > 1:
        assert config.hints.occupancy * config.rows * sum(config.widths) <= 6 * 2048


ROW = RowForward(1, Hints(2, 8), (4096, 1024))
STREAM = StreamForward(1, Hints(2, 8), (4096, 1024), tma=True, store=True)
SHARED = SharedForward(Hints(4), (1024,), packed=True)  # five blocks share a row
CHUNK, TINY = Backward((1024,)), Backward((16,))
VECTORS = "tile loads need rows=1, rows of whole vectors, and a GPU with TMA"
# (why it is refused, the configuration, what it would serve besides rows of 5120 in 16 bits)
REFUSED = [
    ("rows 3 is not a power of two", replace(ROW, rows=3), {}),
    ("tiles 3 is not a power of two", RopeForward(4, 3), {}),
    ("hints out of range", replace(STREAM, hints=Hints(33)), {}),
    ("hints out of range: Hints(", replace(SHARED, hints=Hints(2, 5)), {}),
    (VECTORS, replace(STREAM, rows=2), {}),
    ("tile stores need tile loads", replace(STREAM, tma=False), {}),
    ("not descending", replace(ROW, widths=(1024, 4096)), {}),
    ("powers of two", replace(STREAM, widths=(4096, 1000)), {}),
    ("(4096, 512) do not fit a row of 5120", replace(STREAM, widths=(4096, 512)), {}),
    ("(8192,) hold a whole row of 5120, so that no", replace(SHARED, widths=(8192,)), {}),
    ("of a chunk do not end at a whole vector", replace(SHARED, widths=(1024, 4)), {}),
    ("blocks that share rows need rows=1 and no tile loads", replace(CHUNK, rows=2), {}),
    ("or at most the number of segments", SharedForward(Hints(), (1024,) * 4, together=5), {}),
    ("which then have one width", SharedForward(Hints(), (2048, 1024), together=2), {}),
    ("fetch needs segments of one width", RowForward(1, widths=(4096, 1024), fetch=True), {}),
    ("at most 8192 bytes", RowForward(1, Hints(None, 8), (8192,), fetch=True), {}),
    (VECTORS, STREAM, {"aligned": False}),
    (VECTORS, STREAM, {"target": Target.of("sm_80")}),
    ("packed needs rows with 16-bit elements", SHARED, {"item_bytes": 4}),
    ("reread needs rows=1", Backward((512,), 2, reread=True), {"hidden": 512}),
    ("needs more than 1024 chunks of 16", TINY, {"hidden": 16388, "item_bytes": 4}),
]
USUAL = {"hidden": 5120, "item_bytes": 2, "aligned": True, "target": H200}


@pytest.mark.parametrize("message, config, given", REFUSED, ids=str)
def test_wrong_configurations_say_why(message, config, given):
    assert message in config.refusal(Served(**USUAL | given))
