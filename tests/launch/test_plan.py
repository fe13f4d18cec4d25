"""Plans depend on the spec and the target alone, and no row count specialises their kernels."""

from dataclasses import replace
from itertools import cycle, product
from random import Random

import pytest

from tests.support import cases
from tests.support.executors import arguments_of, backward_calls, forward_calls
from tests.support.quantized import HOWS
from tilenorm.kernels.forward import row_forward
from tilenorm.launch import user_table
from tilenorm.launch.calls import MAX_GRID, MAX_SIDE, Needs, constants_of, every_gradient
from tilenorm.launch.config import Hints, RowForward, SharedForward
from tilenorm.launch.kernel import hinted
from tilenorm.launch.order import forward_order
from tilenorm.launch.plan import plan_backward, plan_forward
from tilenorm.launch.target import MULTIPROCESSORS, Target
from tilenorm.launch.tiling import CLEAR_SLOTS
from tilenorm.launch.tuned.quantized import MOST_OF_ROWS, ONE_ROW, SHARED
from tilenorm.launch.user_table import Key
from tilenorm.ops.passes.registry import MAX_ROWS
from tilenorm.spec import NormSpec, Rotation
from tilenorm.table import NORMS
from tilenorm.tools.precompile import calls_of

H200 = Target.of("sm_90")
ALL = Needs(True, True, True)
LARGEST_TENSOR = 1 << 37  # bytes: half of a B300's memory
FAMILY = (
    {"norm": "rms"},
    {"norm": "layer", "residual": "float32"},
    {"norm": "rms", "gate": "bfloat16"},
    {"norm": "layer", "heads": 6},
)
VARIES = {"FETCH", "PACKED", "ROWS", "WIDTHS", "TILE_HEADS", "THREADS", "BY_ROWS"}
VARIES |= {"EARLY", "BESIDE"}
SPECS = [
    NormSpec(hidden=hidden, dtype=dtype, weight=dtype, bias=dtype, **next(turns))
    for turns in [cycle(FAMILY)]
    for hidden, dtype in product(cases.HIDDEN, ("bfloat16", "float32"))
]
each_arch = pytest.mark.parametrize("arch", MULTIPROCESSORS)


def all_calls(spec, target, rows):
    rows = rows // 6 * 6 if spec.heads else rows
    needs = every_gradient(spec)
    return forward_calls(spec, target, rows, True) + backward_calls(spec, target, rows, needs)


@pytest.mark.parametrize("arch", ["sm_90", "sm_90_H100", "sm_100"])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "add_rms_norm", "gated_layer_norm"])
def test_small_batches_have_a_variant_with_the_same_order(arch, op):
    """They differ in how a block works alone. Which batches are small: rules.SMALL_BATCH_*."""
    target, variants, fewer_rows, most_tiles = Target.of(arch), 0, 0, set()
    for hidden, dtype in product(cases.HIDDEN, ("bfloat16", "float32")):
        roles = dict.fromkeys(("weight", *["bias"] * ("layer" in op)), dtype)
        added = {"add": "residual", "gated": "gate"}.get(op.split("_")[0])
        spec = NormSpec.of(op, hidden, dtype, **roles, **({added: dtype} if added else {}))
        plan = plan_forward(spec, target, True)
        small, large = (forward_calls(spec, target, rows, True)[-1] for rows in (1, 1_000_000))
        in_small, in_large = (constants_of(c.kernel, c.arguments) for c in (small, large))
        assert not plan.queues(1) and plan.queues(1_000_000)
        differ = {name for name in in_small if in_small[name] != in_large[name]}
        variant = plan.for_small_batches
        if variant is None:
            assert not differ and small.kernel is large.kernel
            continue
        variants += 1
        fewer_rows += variant.config.rows < plan.config.rows
        assert differ <= VARIES
        assert variant.for_small_batches is None and variant.order == plan.order
        assert (in_small["FETCH"], in_small["PACKED"]) == (False, False)
        assert in_large["PACKED"] == plan.config.packed and not in_large["BY_ROWS"]
        assert in_small["BY_ROWS"] == (variant.config.rows > 1)
        hints = variant.compiled.hints
        assert in_small["THREADS"] == hints.threads <= in_large["THREADS"]
        assert hints.occupancy in (None, 1)
        assert small.kernel is hinted(row_forward, hints)
        fewest_queued = next(rows for rows in range(1, 100_000) if plan.queues(rows))
        tiles = (fewest_queued - 1) // plan.config.rows // target.multiprocessors
        # The blocks of a plan with an occupancy have 16 warps together.
        most = 512 // plan.config.hints.threads if plan.config.hints.occupancy else 2
        assert tiles == max(1, min(most, 24576 // (plan.config.rows * hidden)))
        most_tiles.add(tiles)
    assert variants and (fewer_rows or op.endswith("rms_norm"))
    assert arch != "sm_90" or op == "gated_layer_norm" or most_tiles == {1, 2, 4}


@pytest.mark.parametrize("roles", [{"bias": "bfloat16"}, {"residual": "bfloat16"}])
def test_a_row_of_a_small_batch_has_fewer_segments(roles):
    """Four segments or more become one in a sum, and two without one, in the same order."""
    op = "layer_norm" if "bias" in roles else "add_rms_norm"
    spec = NormSpec.of(op, 4096, "bfloat16", weight="bfloat16", **roles)
    plan = plan_forward(spec, Target.of("sm_90"), False)
    variant = plan.for_small_batches
    assert plan.config.widths == (1024,) * 4 and variant.order == plan.order
    assert variant.config.widths == ((2048, 2048) if "bias" in roles else (4096,))
    in_float32 = plan_forward(
        NormSpec.of("layer_norm", 4096, "float32", weight="float32"), Target.of("sm_90"), False
    )
    assert in_float32.for_small_batches is None


@each_arch
@pytest.mark.parametrize("rows", [1, 1000, 1 << 20, MAX_ROWS])
def test_scratch_is_bounded(arch, rows):
    target = Target.of(arch)
    assert plan_backward(SPECS[0], target, Needs(True, False, False)).partials(rows) is None
    for spec in SPECS:
        for needs in (ALL, Needs(False, True, False), Needs(True, False, True)):
            plan = plan_backward(spec, target, needs)
            # The row count is a multiple of the heads.
            whole = rows // (spec.heads or 1) * (spec.heads or 1) or (spec.heads or 1)
            partial_rows, width = plan.partials(whole)
            # With heads each row of a tile has its own partial sums.
            tile = plan.config.rows if spec.heads else 1
            assert width == spec.hidden * (spec.heads or 1)
            elements = partial_rows * width // needs.sums
            assert elements <= 6 * target.multiprocessors * tile * spec.hidden, spec
            assert spec.heads or elements <= rows * spec.hidden


@each_arch
def test_blocks_that_share_rows_are_resident_at_once(arch):
    shared = 0
    for spec in SPECS:
        plan = plan_backward(spec, Target.of(arch), every_gradient(spec))
        if plan.chunks > 1:
            shared += 1
            sets = plan.blocks(1 << 20)
            assert plan.chunks <= plan.resident, spec
            assert sets * plan.chunks <= plan.resident or sets == spec.heads, spec
    assert shared


@pytest.mark.parametrize("arch, overlap", [("sm_80", False), ("sm_90", True)])
def test_kernels_of_rows_that_blocks_share_start_early(arch, overlap):
    spec = NormSpec("rms", 65536, "bfloat16", "bfloat16")
    for calls in (
        forward_calls(spec, Target.of(arch), 1000, True),
        backward_calls(spec, Target.of(arch), 1000, every_gradient(spec)),
    ):
        first, main, *rest = calls
        assert first.kernel is CLEAR_SLOTS
        assert arguments_of(first)["SLOTS"] is arguments_of(main)["SLOTS"]
        assert [c.overlap for c in calls] == [overlap, overlap, *(overlap for _ in rest)]
        assert all(arguments_of(call)["OVERLAP"] is overlap for call in calls)


@pytest.mark.parametrize("arch, overlap", [("sm_80", False), ("sm_90", True)])
def test_kernels_of_a_modulated_norm_start_early(arch, overlap):
    for weight, kernels in ((None, 2), ("bfloat16", 3)):
        spec = NormSpec("rms", 64, "bfloat16", weight, mod_scale="bfloat16")
        plan = plan_backward(spec, Target.of(arch), every_gradient(spec))
        calls = calls_of(plan, 1000, 4)
        assert [c.overlap for c in calls] == [overlap] * kernels


@pytest.mark.parametrize("arch, overlap", [("sm_80", False), ("sm_90", True)])
def test_few_blocks_start_early_and_fewer_let_the_next_kernel_start_beside_them(arch, overlap):
    """Those of 4 Mi elements, and of 1 Mi: see rules.EARLY_ELEMENTS."""
    shapes = [(NormSpec("rms", n, "bfloat16", "bfloat16"), n) for n in (64, 1024, 4096, 8192)]
    how = {"weight": "bfloat16", "rotation": Rotation(128, 128)}
    rotated = NormSpec.of("rms_norm_rope", 128, "bfloat16", **how)
    for spec, n in (*shapes, (rotated, 128)):
        for rows in (1, 1_000_000):
            call = forward_calls(spec, Target.of(arch), rows, False)[-1]
            given = arguments_of(call)
            early, beside = given["EARLY"], given["BESIDE"]
            elements = n * given["ROWS"] * given.get("TILES", 1)
            most = 1 << 22 if overlap else 0
            assert early * elements <= most < (early + 1) * elements
            assert beside * elements <= most // 4 < (beside + 1) * elements
            assert call.overlap is (overlap and rows == 1) and not given["OVERLAP"]
    shared = forward_calls(NormSpec("rms", 65536, "bfloat16"), Target.of(arch), 1, False)[-1]
    given = arguments_of(shared)
    assert (given["OVERLAP"], given["EARLY"], given["BESIDE"]) == (overlap, 0, 0)
    narrow = forward_calls(NormSpec("rms", 1, "bfloat16"), Target.of(arch), 1, False)[-1]
    assert arguments_of(narrow)["EARLY"] < MAX_SIDE


@pytest.mark.parametrize("dtype, early", [("float32", False), ("bfloat16", True)])
def test_a_backward_pass_of_two_sets_of_warps_does_not_start_early(dtype, early):
    """See rules.NEVER_EARLY. Its column sum does."""
    spec = NormSpec("rms", 4096, dtype, dtype)
    main, column_sum = backward_calls(spec, Target.of("sm_90"), 1000, every_gradient(spec))
    assert main.overlap is early and arguments_of(main)["OVERLAP"] is early
    assert column_sum.overlap and arguments_of(column_sum)["OVERLAP"]


@each_arch
def test_grids_can_be_launched(arch):
    """Of the most rows that tilenorm accepts, and that fit the largest GPU with the output."""
    for spec in SPECS:
        rows = min(MAX_ROWS, LARGEST_TENSOR // (spec.hidden * spec.item_bytes))
        for kernel, grid, *_ in all_calls(spec, Target.of(arch), rows):
            most = (MAX_GRID, MAX_SIDE, MAX_SIDE)
            fits = all(1 <= n <= m for n, m in zip(grid, most, strict=False))
            assert fits, (spec, kernel._pyfunc.__name__, grid)


@pytest.mark.parametrize("hidden", [64, 4096, 65536])
@pytest.mark.parametrize("rows", [1, MAX_SIDE, MAX_SIDE + 1, MAX_GRID, MAX_GRID + 1, 40_000_000])
def test_launches_cover_every_row_once(rows, hidden):
    spec = NormSpec("rms", hidden, "bfloat16")
    config = plan_forward(spec, H200, True).config
    reached = 0
    for call in forward_calls(spec, H200, rows, True):
        given = arguments_of(call)
        if call.kernel is CLEAR_SLOTS:
            cleared = call.grid[0] * given["TILE_ROWS"]
            assert rows <= cleared < rows + given["TILE_ROWS"]
            continue
        assert given["first"] == reached
        if given["CHUNKS"] > 1:
            reached += call.grid[0] // given["CHUNKS"]
        else:
            x, y, z = call.grid
            assert (x, given["step"]) == (1, y) and y * z < 1 << 31
            reached += y * z
    assert rows <= reached * config.rows < rows + config.rows


def test_kernels_whose_order_depends_on_registers_always_write_rstd(monkeypatch):
    """Some compiled kernels that differ only in writing rstd add in another order. A user's table
    alone bounds the registers of kernels whose order is the compiler's.
    """
    for hidden, hints in ((4096, Hints(8)), (1001, Hints(8)), (1001, Hints())):
        spec = NormSpec("rms", hidden, "bfloat16", "bfloat16")
        configs = {Key.of(spec, "forward", "rms_norm"): RowForward(1, hints)}
        monkeypatch.setattr(user_table, "configs", lambda arch, found=configs: found)
        plan_forward.cache_clear()
        plans = [plan_forward(spec, H200, save) for save in (False, True)]
        free = not plans[0].order.prescribes
        assert free == (hidden == 1001)
        assert [plan.save for plan in plans] == [free and hints == Hints(8), True]
    plan_forward.cache_clear()


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_a_quantised_norm_has_the_order_and_threads_of_the_plain_norm(arch):
    """So that q has its bits. Registers are spared for as many blocks as a multiprocessor holds. A
    tile that would take too many has fewer rows, which are added up alike.
    """
    rng, target, fused, fewer_rows, in_slices = Random(arch), Target.of(arch), 0, 0, 0
    for _ in range(300):
        op, dtype = rng.choice(NORMS[:4]), rng.choice(cases.DTYPES)
        hidden = 128 * rng.randint(1, rng.choice((16, 160, 2048)))
        spec = NormSpec.of(op, hidden, dtype, weight=dtype, quantized=rng.choice(HOWS))
        plan, plain = (plan_forward(s, target, False) for s in (spec, spec.unquantized))
        if plan.spec.quantized is None:
            continue
        fused += 1
        found, config = plan.compiled, plan.config
        if config != plain.config:
            assert plan.order == plain.order and config.rows < plain.config.rows
            few, many = (c.elements_of_thread(hidden) for c in (config, plain.config))
            assert few <= MOST_OF_ROWS < many
            fewer_rows += 1
        assert found.hints.num_worker_warps == config.hints.num_worker_warps
        assert (found.hints.occupancy or 1) * found.hints.threads <= 2048
        free = {"hints": found.hints}
        if isinstance(config, RowForward) and config.rows == 1:
            assert not found.packed or spec.widest_item == 2
            free |= {"packed": found.packed, "fetch": found.fetch}
            if found.widths != config.widths:  # segments of one slice, in the same order
                assert forward_order(spec, found) == plan.order and spec.widest_item == 2
                assert set(found.widths) == {piece.width for piece in plan.order.slices}
                assert found.widths == plan.cut.WIDTHS
                in_slices += 1
                free |= {"widths": found.widths}
        if isinstance(config, SharedForward):
            assert (found.hints.occupancy or 1) <= config.hints.occupancy
            assert found.together in (1, config.together)
            free |= {"together": found.together}
        assert found == replace(config, **free), spec
        if small := plan.for_small_batches:  # a small batch has fewer blocks than fit
            assert config.fetch and small.hints == Hints(None, config.hints.num_worker_warps)
    assert fused > 70 and (fewer_rows or arch != "sm_90") and in_slices


@pytest.mark.parametrize("rows", [*ONE_ROW.values(), *SHARED.values()], ids=str)
def test_more_elements_of_a_thread_have_no_fewer_registers(rows):
    assert list(rows) == sorted(rows)
    assert [registers for _, registers in rows] == sorted(registers for _, registers in rows)
