"""Candidates: every shipped configuration is one, all of them can serve, and the others say why."""

from dataclasses import replace

import pytest

from tests import cases
from tilenorm.launch.candidates import candidates, explicit, refusal, segmentations
from tilenorm.launch.config import Backward, Forward, Hints, Wide
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec

from .test_heuristics import CHECKS, each_table, spec_of

H200 = Target.of("sm_90")


@each_table
def test_every_shipped_configuration_is_a_candidate(arch, direction, key, table):
    for hidden, config in table:
        tried = candidates(spec_of(hidden, key), Target.of(arch), direction.lower())
        assert explicit(config, hidden) in tried, hidden


@pytest.mark.parametrize("direction", cases.DIRECTIONS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_candidates_can_serve(arch, direction):
    target = Target.of(arch)
    for hidden in cases.HIDDEN:
        spec = NormSpec("rms", hidden, "bfloat16")
        found = candidates(spec, target, direction)
        assert found and len(found) == len(set(found))
        for config in found:
            CHECKS[type(config)](config, hidden, target, spec.aligned)


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
        (37, {(64,)}),
    ],
)
def test_segmentations(hidden, some):
    found = segmentations(hidden)
    assert some <= set(found)
    for widths in found:
        assert sum(widths) >= hidden > sum(widths[:-1])


RIGHT = Forward(1, Hints(2, 8), (4096, 1024), loop=True, tma=True, store=True)
WRONG = {
    "no power of two": replace(RIGHT, rows=3),
    "no such hints": replace(RIGHT, hints=Hints(33)),
    "no such hints:": replace(RIGHT, hints=Hints(2, 5)),
    "one row at a time": replace(RIGHT, rows=2),
    "tile stores come with tile loads": replace(RIGHT, tma=False),
    "tile loads come with a loop": replace(RIGHT, loop=False),
    "descending": replace(RIGHT, widths=(1024, 4096)),
    "powers of two": replace(RIGHT, widths=(4096, 1000)),
    "do not end with a row": replace(RIGHT, widths=(4096, 512)),
    "do not end": replace(RIGHT, widths=(4096, 1024, 1024)),
    "none of the forward pass": Backward((8192,)),
    "no such chunks": Wide(tile=3000),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_serve(message):
    assert refusal(RIGHT, 5120, True, H200, "forward") is None
    assert message in refusal(WRONG[message], 5120, True, H200, "forward")


def test_tile_loads_need_vectors_and_the_hardware():
    row = "one row at a time, of whole vectors, and a GPU that has them"
    assert row in refusal(RIGHT, 5120, False, H200, "forward")
    assert row in refusal(RIGHT, 5120, True, Target.of("sm_80"), "forward")
