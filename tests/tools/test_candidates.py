"""Candidates: every shipped configuration is one, all of them can serve, and the others say why."""

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
def test_candidates_are_few(dtype, direction):
    for hidden in cases.HIDDEN:
        for fields in cases.tabled(dtype):
            spec = NormSpec(**{"norm": "rms", "hidden": hidden, "dtype": dtype, **fields})
            assert len(candidates(spec, H200, direction)) < 512


@pytest.mark.parametrize("direction", cases.DIRECTIONS)
def test_blocks_share_wide_rows(direction):
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


def test_scratch_by_heads_is_bounded():
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
SHARED = SharedForward(Hints(4), (1024,), packed=True)  # five blocks a row
WHOLE, CHUNK = Backward((8192,)), Backward((1024,))
RIGHT = (ROW, STREAM, SHARED, WHOLE, CHUNK)
WRONG = {
    "rows 3 is no power of two": replace(ROW, rows=3),
    "no such hints": replace(STREAM, hints=Hints(33)),
    "no such hints:": replace(SHARED, hints=Hints(2, 5)),
    "one row at a time": replace(STREAM, rows=2),
    "tile stores come with tile loads": replace(STREAM, tma=False),
    "no descending": replace(ROW, widths=(1024, 4096)),
    "powers of two": replace(STREAM, widths=(4096, 1000)),
    "do not end with a row of 5120": replace(ROW, widths=(4096, 1024, 1024)),
    "(4096, 512) do not end": replace(STREAM, widths=(4096, 512)),
    "(8192,) hold a whole row of 5120, which no blocks share": replace(SHARED, widths=(8192,)),
    "of a chunk are no whole vectors": replace(SHARED, widths=(1024, 4)),
    "gather one at a time, without tile loads": replace(CHUNK, rows=2),
    "one at a time, without tile loads": replace(CHUNK, tma=True),
    "weights are read together for at most all segments": SharedForward(
        Hints(), (1024,) * 4, together=5
    ),
    "are read together": SharedForward(Hints(), (1024,) * 4, together=0),
    "which have one width": SharedForward(Hints(), (2048, 1024), together=2),
    "one width, here at most 4096 bytes": RowForward(1, widths=(4096, 1024), fetch=True),
    "at most 8192 bytes": RowForward(1, Hints(None, 8), (8192,), fetch=True),
}


def served(hidden=5120, item_bytes=2, aligned=True, target=H200) -> Served:
    return Served(hidden, item_bytes, aligned, target)


@pytest.mark.parametrize("config", RIGHT, ids=str)
def test_what_can_serve(config):
    assert config.refusal(served()) is None


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_serve(message):
    assert message in WRONG[message].refusal(served())


@pytest.mark.parametrize("config", [SHARED, Backward((8192,), packed=True)], ids=str)
def test_packed_rows_have_16_bits(config):
    assert config.refusal(served(aligned=False)) is None
    message = "packed takes rows of 16 bits an element"
    assert config.refusal(served(item_bytes=4)) == message
    assert replace(config, packed=False).refusal(served(item_bytes=4)) is None


def test_weights_are_read_again_by_tiles_of_a_row():
    config = Backward((512,), reread=True)
    assert config.refusal(served(512)) is None
    message = "weights are read again by tiles of one row"
    assert replace(config, rows=2).refusal(served(512)) == message
    for weight in (None, "bfloat16"):
        spec = NormSpec("layer", 16384, "bfloat16", weight)
        found = candidates(spec, H200, "backward")
        assert any(c.reread for c in found) == (weight is not None)


def test_weights_are_fetched_with_rows():
    for weight in (None, "bfloat16"):
        found = candidates(NormSpec("rms", 8192, "bfloat16", weight), H200, "forward")
        assert any(getattr(c, "fetch", False) for c in found) == (weight is not None)


def test_weights_of_chunks_are_read_together():
    """Where a thread reads a vector of each segment: of wider ones it reads a store apart."""
    for weight, dtype in ((None, "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")):
        found = candidates(NormSpec("rms", 65536, dtype, weight), H200, "forward")
        found = [c for c in found if isinstance(c, SharedForward)]
        assert {c.together for c in found} == ({1, 2, 4} if weight else {1})
        for config in found:
            if config.together > 1:
                vectors = 8 if dtype == "bfloat16" else 4
                assert config.widths[0] == vectors * 32 * (config.hints.num_worker_warps or 4)


def test_as_many_chunks_as_a_block_collects():
    config = Backward((16,))
    assert config.refusal(served(16384, 4)) is None
    assert "takes more than 1024 chunks of 16" in config.refusal(served(16388, 4))


def test_tile_loads_need_vectors_and_the_hardware():
    row = "one row at a time, of whole vectors, and a GPU that has them"
    assert row in STREAM.refusal(served(aligned=False))
    assert row in STREAM.refusal(served(target=Target.of("sm_80")))
