"""Every shipped configuration is a candidate, all candidates can serve, and refusals say why."""

from dataclasses import replace
from random import Random

import pytest

from tests import cases
from tests.launch.test_heuristics import check, each_table, spec_of
from tilenorm.launch.config import (
    Backward,
    Hints,
    RowForward,
    Served,
    SharedForward,
    StreamForward,
    cdiv,
)
from tilenorm.launch.target import MULTIPROCESSORS, Target
from tilenorm.spec import NormSpec
from tilenorm.tools.candidates import Search, explicit

H200 = Target.of("sm_90")
B, F = "bfloat16", "float32"


@each_table
def test_every_shipped_configuration_is_a_candidate(arch, direction, key, table):
    for hidden, config in table:
        tried = Search(spec_of(hidden, key), Target.of(arch), direction).candidates()
        assert config is None or explicit(config, hidden) in tried, hidden


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
FOUR = SharedForward(Hints(), (1024,) * 4)
WHOLE, CHUNK, TINY = Backward((8192,), packed=True), Backward((1024,)), Backward((16,))
REREAD = Backward((512,), reread=True)
VECTORS = "tile loads need rows=1, rows of whole vectors, and a GPU with TMA"
TWO_BYTES = "packed needs rows with 16-bit elements"
# (why it is refused, the configuration, what it would serve besides rows of 5120 in 16 bits)
REFUSED = [
    ("rows 3 is not a power of two", replace(ROW, rows=3), {}),
    ("hints out of range", replace(STREAM, hints=Hints(33)), {}),
    ("hints out of range: Hints(", replace(SHARED, hints=Hints(2, 5)), {}),
    (VECTORS, replace(STREAM, rows=2), {}),
    ("tile stores need tile loads", replace(STREAM, tma=False), {}),
    ("not descending", replace(ROW, widths=(1024, 4096)), {}),
    ("powers of two", replace(STREAM, widths=(4096, 1000)), {}),
    ("do not fit a row of 5120", replace(ROW, widths=(4096, 1024, 1024)), {}),
    ("(4096, 512) do not fit", replace(STREAM, widths=(4096, 512)), {}),
    ("(8192,) hold a whole row of 5120, so that no", replace(SHARED, widths=(8192,)), {}),
    ("of a chunk do not end at a whole vector", replace(SHARED, widths=(1024, 4)), {}),
    ("blocks that share rows need rows=1 and no tile loads", replace(CHUNK, rows=2), {}),
    ("need rows=1 and no tile loads", replace(CHUNK, tma=True), {}),
    ("together is 1, or at most the number", replace(FOUR, together=5), {}),
    ("or at most the number of segments", replace(FOUR, together=0), {}),
    ("which then have one width", SharedForward(Hints(), (2048, 1024), together=2), {}),
    ("fetch needs segments of one width", RowForward(1, widths=(4096, 1024), fetch=True), {}),
    ("at most 8192 bytes", RowForward(1, Hints(None, 8), (8192,), fetch=True), {}),
    (VECTORS, STREAM, {"aligned": False}),
    (VECTORS, STREAM, {"target": Target.of("sm_80")}),
    (TWO_BYTES, SHARED, {"item_bytes": 4}),
    (TWO_BYTES, WHOLE, {"item_bytes": 4}),
    ("reread needs rows=1", replace(REREAD, rows=2), {"hidden": 512}),
    ("needs more than 1024 chunks of 16", TINY, {"hidden": 16388, "item_bytes": 4}),
]
USUAL = {"hidden": 5120, "item_bytes": 2, "aligned": True, "target": H200}


@pytest.mark.parametrize("message, config, given", REFUSED, ids=str)
def test_wrong_configurations_say_why(message, config, given):
    assert message in config.refusal(Served(**USUAL | given))
