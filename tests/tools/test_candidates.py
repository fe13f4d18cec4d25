"""Every shipped configuration is a candidate, all candidates can serve, and refusals say why."""

from dataclasses import replace

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
)
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec
from tilenorm.tools.candidates import candidates, explicit, segmentations

H200 = Target.of("sm_90")


@each_table
def test_every_shipped_configuration_is_a_candidate(arch, direction, key, table):
    for hidden, config in table:
        tried = candidates(spec_of(hidden, key), Target.of(arch), direction.lower())
        assert config is None or explicit(config, hidden) in tried, hidden


@pytest.mark.parametrize("direction", cases.DIRECTIONS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_candidates_can_serve(arch, direction):
    target = Target.of(arch)
    for hidden in cases.HIDDEN:
        spec = NormSpec("rms", hidden, "bfloat16")
        found = candidates(spec, target, direction)
        assert found and len(found) == len(set(found))
        for config in found:
            check(config, spec, target)


@pytest.mark.parametrize("direction", cases.DIRECTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_number_of_candidates_is_bounded(dtype, direction):
    for hidden in cases.HIDDEN:
        for fields in cases.tabled(dtype):
            spec = NormSpec(**{"norm": "rms", "hidden": hidden, "dtype": dtype, **fields})
            assert len(candidates(spec, H200, direction)) < 512


@pytest.mark.parametrize("direction", cases.DIRECTIONS)
def test_candidates_for_wide_rows_share_rows(direction):
    for hidden in (8192, 65536):
        spec = NormSpec("rms", hidden, "bfloat16", "bfloat16", gate="bfloat16")
        found = [c for c in candidates(spec, H200, direction) if cases.shares(c, hidden)]
        assert {c.packed for c in found} == {False, True}
        assert {c.hints.num_worker_warps for c in found} == {None, 8}
        assert len({c.widths for c in found}) >= 2
        for wider in (replace(spec, gate="float32"), replace(spec, dtype="float32")):
            assert not any(getattr(c, "packed", False) for c in candidates(wider, H200, direction))


def test_backward_blocks_that_share_rows_are_resident():
    for arch, heads in (("sm_90", 0), ("sm_121", 0), ("sm_90", 4)):
        spec, target = NormSpec("rms", 131072, "bfloat16", heads=heads), Target.of(arch)
        found = candidates(spec, target, "backward")
        assert found
        for config in found:
            chunks = 131072 // sum(config.widths) * (heads or 1)
            assert chunks <= target.multiprocessors * config.hints.occupancy


def test_scratch_with_heads_is_bounded():
    for hidden in (32, 128, 1024):
        spec = NormSpec("rms", hidden, "bfloat16", "bfloat16", heads=16)
        found = [c for c in candidates(spec, H200, "backward") if c.rows > 1]
        assert found
        assert all(c.hints.occupancy * c.rows * sum(c.widths) <= 6 * 2048 for c in found)


@pytest.mark.parametrize(
    "hidden, some",
    [
        (12288, {(16384,), (8192, 4096), (4096, 4096, 4096)}),
        (7168, {(8192,), (4096, 2048, 1024), (4096, 4096)}),
        (20480, {(16384, 4096), (8192, 8192, 4096), (4096,) * 5}),
        (5000, {(8192,), (4096, 1024)}),
        (1024, {(1024,), (512, 512), (256,) * 4}),
        (37, {(64,)}),
    ],
)
def test_segmentations(hidden, some):
    found = segmentations(hidden)
    assert some <= set(found)
    for widths in found:
        assert sum(widths) >= hidden > sum(widths[:-1])


ROW = RowForward(1, Hints(2, 8), (4096, 1024))
STREAM = StreamForward(1, Hints(2, 8), (4096, 1024), tma=True, store=True)
SHARED = SharedForward(Hints(4), (1024,), packed=True)  # five blocks share a row
WHOLE, CHUNK, TINY = Backward((8192,), packed=True), Backward((1024,)), Backward((16,))
REREAD = Backward((512,), reread=True)
VECTORS = "tile loads need rows=1, rows of whole vectors, and a GPU with TMA"
TWO_BYTES = "packed needs rows with 16-bit elements"
# (why it is refused, the configuration, what it would serve besides rows of 5120 in 16 bits)
REFUSED = [
    ("rows 3 is not a power of two", replace(ROW, rows=3), {}),
    ("hints out of range", replace(STREAM, hints=Hints(33)), {}),
    ("hints out of range: Hints(", replace(SHARED, hints=Hints(2, 5)), {}),
    ("tile loads need rows=1, ", replace(STREAM, rows=2), {}),
    ("tile stores need tile loads", replace(STREAM, tma=False), {}),
    ("not descending", replace(ROW, widths=(1024, 4096)), {}),
    ("powers of two", replace(STREAM, widths=(4096, 1000)), {}),
    ("do not fit a row of 5120", replace(ROW, widths=(4096, 1024, 1024)), {}),
    ("(4096, 512) do not fit", replace(STREAM, widths=(4096, 512)), {}),
    ("(8192,) hold a whole row of 5120, so that no", replace(SHARED, widths=(8192,)), {}),
    ("of a chunk do not end at a whole vector", replace(SHARED, widths=(1024, 4)), {}),
    ("blocks that share rows need rows=1 and no tile loads", replace(CHUNK, rows=2), {}),
    ("need rows=1 and no tile loads", replace(CHUNK, tma=True), {}),
    ("together is 1, or at most the number", SharedForward(Hints(), (1024,) * 4, together=5), {}),
    ("or at most the number of segments", SharedForward(Hints(), (1024,) * 4, together=0), {}),
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
RIGHT = [(config, {}) for config in (ROW, STREAM, SHARED, WHOLE, CHUNK)]
RIGHT += [(replace(config, packed=False), {"item_bytes": 4}) for config in (SHARED, WHOLE)]
RIGHT += [(config, {"aligned": False}) for config in (SHARED, WHOLE)]
RIGHT += [(REREAD, {"hidden": 512}), (TINY, {"hidden": 16384, "item_bytes": 4})]
USUAL = {"hidden": 5120, "item_bytes": 2, "aligned": True, "target": H200}


@pytest.mark.parametrize("config, given", RIGHT, ids=str)
def test_right_configurations_can_serve(config, given):
    assert config.refusal(Served(**USUAL | given)) is None


@pytest.mark.parametrize("message, config, given", REFUSED, ids=str)
def test_wrong_configurations_say_why(message, config, given):
    assert message in config.refusal(Served(**USUAL | given))


def test_weights_are_reread_or_fetched_if_there_are_weights():
    for weight in (None, "bfloat16"):
        found = candidates(NormSpec("layer", 16384, "bfloat16", weight), H200, "backward")
        assert any(c.reread for c in found) == (weight is not None)
        found = candidates(NormSpec("rms", 8192, "bfloat16", weight), H200, "forward")
        assert any(getattr(c, "fetch", False) for c in found) == (weight is not None)


def test_weights_of_several_segments_are_read_together():
    """Only if a thread reads one vector of each segment.

    The weights of wider segments are read one segment at a time, each before its store.
    """
    for weight, dtype in ((None, "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")):
        found = candidates(NormSpec("rms", 65536, dtype, weight), H200, "forward")
        found = [c for c in found if isinstance(c, SharedForward)]
        assert {c.together for c in found} == ({1, 2, 4} if weight else {1})
        for config in found:
            if config.together > 1:
                vectors = 8 if dtype == "bfloat16" else 4
                assert config.widths[0] == vectors * 32 * (config.hints.num_worker_warps or 4)
