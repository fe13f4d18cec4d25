"""The numbers of the rules in heuristics.py, plan.py and tiling.py, for every architecture.

A number whose comment names no time was not timed: it keeps the registers of kernels, estimated or
compiled by tileiras 13.4.92, within what a block has. Times are those of an NVIDIA H200 (driver
580.159, tileiras 13.4.92, cuda-tile 1.7.0).
"""

from ..config import ColumnSum, Hints, RopeBackward, RopeForward

# Of the compiler and of cuTile, with which the numbers were found, as in user_table.versions().
VERSIONS = {"tileiras": "13.4.92", "cuda-tile": "1.7.0"}
TILE = 2048  # elements of a tile of several rows
# Forward: the most elements of a row that a block keeps, over all inputs. 2026-11-21.
FORWARD_TILE = 16384
# Forward, blocks that share a row: blocks on a multiprocessor by the number of inputs; vectors that
# a thread reads, over all inputs; elements of a chunk if rows do not fill vectors. 2026-11-22.
FORWARD_BLOCKS, FORWARD_VECTORS, FORWARD_CHUNK = {1: 3, 2: 2}, 8, 4096
# Forward, a row in a block: the most segments, and from how many elements over all inputs on a row
# of 16 bits is packed. As in the tables of sm_90; untimed elsewhere.
MOST_SEGMENTS, PACKED_FROM = 8, 24576
# Backward: the most elements of a row that a block without TMA keeps without spilling, by the
# number of sums over rows (dw, db). 2026-11-21.
GATHERED = {0: 4096, 1: 4096, 2: 2048}
# Backward: the most elements of a row that a block with TMA keeps; the second number is for three
# inputs and two sums over rows. 2026-11-21.
TMA_TILE, TMA_TILE_OF_MORE = 8192, 4096
# Backward, blocks that share a row: elements of a chunk and blocks on a multiprocessor. WIDE_CHUNK
# is for kernels that do not spill with it, CHUNK for other kernels with two inputs, and MORE_CHUNK
# for more inputs. With one more block on a multiprocessor some of these kernels spill. Compiled on
# 2026-11-22 for sm_80, sm_90, sm_100 and sm_120, sizes of 4097 to 131072. Timed that day in float32
# for rows that do not fill vectors: with WIDE_CHUNK RMSNorm of 20001 and 65537 moved 2778 and 1553
# GB/s, and 2369 and 366 with chunks of 1024; LayerNorm 2188 and 1059, and 1656 and 298. LayerNorm
# in 16 bits with a gate behind it reached 16% of a copy at 262144 and 43% at 65536 on an H100, with
# chunks of 1024 (2026-11-26): at 262144 all blocks together have one row. With WIDE_CHUNK they have
# two, spill at most 24 bytes, and reached 50% of a copy at 262144 and 65% at 65536.
WIDE_CHUNK, CHUNK, MORE_CHUNK = (2048, 2), (1024, 3), (1024, 2)
# Backward, a prescribed order: the most blocks on a multiprocessor, and the most values of a thread
# with which the weight stays in registers. Untimed. Compiled for sm_90 on 2026-11-28, kernels spill
# at most 136 bytes up to 65536 elements. Beyond, three terms of dy in float32 spill up to 336: a
# thread of 4 warps has 16 elements of each of up to five inputs, and chunks that are narrower would
# be too many blocks.
BACKWARD_BLOCKS, BACKWARD_VALUES = 5, 240
# Backward in float16, blocks that share a row: the widest row with a gate that reads its weights
# again, see _for_float16 in heuristics.py.
GATED_FLOAT16 = 65536
# Forward by group: a tile of several rows with more elements than this has half of the rows that
# the plain norm's tile has. Timed in bfloat16 on 2026-11-26. On an H100 the plain norm's tiles took
# longer than half of them: 1.01 to 1.03 times with 64 Mi elements and 1.02 to 1.07 times with 1 Mi,
# by layer_norm of 256 and 512 and by rms_norm of 768; the same time by layer_norm of 768. On an
# H200 it was 1.02 and 1.10 times, by layer_norm of 1024. Tiles of 2048 elements, by rms_norm of 256
# and 512, took 0.97 to 1.00 of the time of half of them.
MODULATED_TILE = 2048
# Backward by group: the widest row that the kernels hold. By how many of these a call has (dW and
# dB, a gate, float32): hints up to a size of row; wider rows have one block of 8 warps. Timed on
# an H100 (driver 580.159, 2026-11-26), layer_norm in bfloat16: beside blocks of 8 warps, those of
# 4 took 0.80, 0.86 and 0.80 of the time at 1152, 1536 and 5120, and 0.86 at 3072 with a gate. At
# 3072 without one they took 0.98 of it for 64 Mi elements, and 1.04 for 4608 rows. The others
# were compiled: in bfloat16, without dW and dB, they spill at most 16 bytes on sm_90 and sm_100,
# 40 on sm_80, and 96 on sm_120. With so many groups for each block that is resident, blocks have
# whole groups, of which some have one more than others. A block has at least so many rows,
# because it writes rows of sums.
MODULATED_ROW = 8192
GROUPED = (
    ((1024, Hints(4)), (1536, Hints(5)), (3072, Hints(2, 8)), (5120, Hints(2))),
    ((1024, Hints(3)), (1280, Hints(4)), (1536, Hints(3)), (3072, Hints(2))),
    ((1536, Hints(2)),),
)
WHOLE_GROUPS, LEAST_ROWS = 8, 4
# Heads that are rotated, backward and forward: the configuration's class, the most elements of a
# head and of all heads of a block for each thread, and hints. ROPE_HEADS: the most heads of a
# block. ROPE_TILES: a tile has at least such a part of a head's columns. Where a norm spans all
# heads of a token: the most elements of a tile for each thread, and, by the elements of a token,
# the hints of the backward pass. Chosen by compiled code alone (2026-11-26): of 120 cases, four
# backward passes spill, 64 bytes in pairs with positions and at most 16 bytes of others. Of
# tokens of more than 4096 elements they spill up to 80 bytes. What serves bfloat16 heads was
# timed afterwards, and nothing beside it: see bench/results/h100-release.md.
ROPE = ((RopeBackward, 16, 32, Hints(3, 4)), (RopeForward, 32, 64, Hints(None, 4)))
ROPE_HEADS, ROPE_TILES, ROPE_ELEMENTS = 4, 8, 4
# Heads that are rotated, forward: of tiles of at most so many columns a thread reads so many
# elements of a row at once. 8192 tokens of 32 and 8 heads in bfloat16: on an H100 (2026-11-28)
# heads of 64 took 36.7, 33.8 and 32.9 µs where a thread read 8, 4 and 2 elements. On an H200
# (2026-11-29) they took 27.4 and 28.2 µs where it read 4 and 2, and heads of 128 took 48.6 and
# 54.8. A row of wider tiles would lie in several warps with 4.
ROPE_NARROW, ROPE_FORWARD = 64, 4
ROPE_TOKENS = ((2048, Hints(4, 4)), (4096, Hints(2, 8)), (8192, Hints(1, 8)))
# Column sum: the most columns that have narrow tiles, and both widths of a tile. Narrow tiles of a
# narrow sum fill the GPU. Timed on 2026-11-21: 1.5 to 2.5 µs from N = 256 to 16384.
NARROW_SUM, NARROW_TILE, WIDE_TILE = 4096, 16, 32
# The tiles that add up the sums of the blocks of a group, up to so many blocks. More blocks have
# the column sum's tiles. Timed for 1152 columns on 2026-11-26: in 256, 64 and 8 groups these tiles
# took 5.8, 3.4 and 4.5 µs, and the column sum's 109, 29 and 6.0. In 4 groups it was 6.7 and 3.9.
GROUP_SUMS = (3, ColumnSum(4, 512)), (96, ColumnSum(16, 256))
# In a small batch a multiprocessor gets at most this many tiles, and at most this many elements.
# Timed on 2026-11-22 for 1 to 128 rows, by the kernel of large batches and by that of small ones:
# rows of 8192 took 2.07 and 1.81 µs, of 12288 2.38 and 2.11 µs, of 16384 2.60 and 2.33 µs.
SMALL_BATCH_TILES, SMALL_BATCH_ELEMENTS = 2, 24576
# Where the kernel of large batches has an occupancy, they are the tiles of so many warps, whose
# threads may have 128 registers. On an H200 (2026-11-29, bench/results/h200-small-batches.md) 512
# bfloat16 rows of 4096, four tiles of 4 warps on a multiprocessor, took 0.91 of the time by
# add_rms_norm and 0.90 by layer_norm; 512 rows of 3072 took 0.85 by add_rms_norm, and of 5120 0.83
# by layer_norm. Where it has none, rms_norm of 5120 took 1.07 and add_rms_norm of 1024 1.03.
SMALL_BATCH_WARPS = 16
# In a small batch a row of so many segments has fewer: by whether it is a sum, how many and up to
# how many elements. On an H100 (2026-11-28, bench/results/h100-small-batches.md) add_rms_norm of
# 8192 in bfloat16 took 0.97, 0.94 and 0.95 of the time of four segments, for 1, 32 and 128 rows.
# That of 4096 took 1.01, 1.00 and 1.00 of the time of two. rms_norm and layer_norm of 8192 took
# longer with one segment. On the H200 layer_norm of 4096, in 16 bits, took 0.92, 0.92 and 0.93 of
# the time of four segments with two, for 8, 32 and 128 rows, and 0.95 with one.
SMALL_BATCH_SEGMENTS, SMALL_BATCH_JOINED = 4, {True: (1, 8192), False: (2, 4096)}
# A forward pass of up to so many elements starts before the kernel before it has ended. On an H200
# (2026-11-29, bench/results/h200-early-starts.md) norms took 0.76 to 0.97 of the time for up to 1
# Mi elements, and rms_norm, layer_norm and add_rms_norm 0.96 to 0.98 for 4 Mi. For 64 Mi these took
# 0.99 to 1.00, and norms with a gate, quantised norms and rotated heads up to 1.07.
EARLY_ELEMENTS = 1 << 22
# Of up to so many elements, the next kernel starts beside the blocks. Beside a start when all
# blocks have ended it took 0.91 to 1.05 of the time, in the mean 0.97. For 2 Mi elements rms_norm,
# add_rms_norm and layer_norm took 1.13, 1.23 and 1.10.
BESIDE_ELEMENTS = 1 << 20
# A backward pass that reads by tile loads, with these hints, never starts early: two sets of warps
# compute in its kernel (USETMAXREG in the machine code), and one set in a kernel that waits.
# Float32 rows of 4096 took 1.06 to 1.15 of the time.
NEVER_EARLY = Hints(1, 4)
# How often a block asks for the sums of the other blocks of its row, which takes about 4 ms
# (2026-11-21). Another kernel on the GPU may delay some blocks of a row by this.
POLLS = 1 << 12
