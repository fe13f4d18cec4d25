"""How quantised norms are compiled, on every architecture.

Compiled for sm_90 by tileiras 13.4.92, 2026-11-24 and 25. Timed on an NVIDIA H200 (driver
580.159.04, tileiras 13.4.92, cuda-tile 1.7.0), 2026-11-25: see
bench/results/h200-quantized-hints.md.
"""

# For tiles of one row without a residual: (most elements of a thread, registers of a thread), by
# whether groups have a scale each. More blocks on a multiprocessor are faster until they spill.
# Timed in bfloat16, rms_norm of 2048, 5120, 8192 and 16384, and on an H100 on 2026-11-26 layer_norm
# by row of 4096 to 32768, beside the plain norm's occupancy and none.
ONE_ROW = {
    False: ((32, 48), (40, 64), (64, 80), (80, 128)),
    True: ((24, 48), (40, 64), (64, 80), (80, 128)),
}
# For blocks that share a row: (most elements of a thread, its least registers), by norm and by
# whether there is a residual. Timed on an H200 on 2026-11-29, rows of 65536. layer_norm of bfloat16
# by row took 98 µs with 5 blocks on a multiprocessor, and 105 with 4; add_layer_norm 157 with 5 and
# 145 with 4. rms_norm of float32 by row took 104 µs with 8 blocks, and 109 with 7. layer_norm of
# float32 took 142 µs with 6, 144 with 5 and 180 with 7.
SHARED = {
    ("rms", False): ((32, 64), (64, 96)),
    ("rms", True): ((32, 64), (64, 96)),
    ("layer", False): ((64, 96),),
    ("layer", True): ((32, 96), (64, 128)),
}
# With more elements, a thread that shares a row reads the weights of one segment at a time. That
# day rms_norm of bfloat16 rows of 65536 took 0.98 of the time by row and by block, and 0.95 with a
# given scale; add_rms_norm took 1.01 by row and 0.98 by block, and add_layer_norm 0.98.
MOST_TOGETHER = 32
# In a tile of several rows: the most elements of a thread, where fewer rows keep the order. With 64
# elements layer_norm_quantized of 1024 takes 176 registers and 33 KiB of shared memory, and took
# 203 µs for 65536 rows on an H100, 2026-11-28. With 32 elements it takes 108 registers, 9 KiB and
# 84 µs (bench/results/h100-release.md).
MOST_OF_ROWS = 32
# In a tile of several rows of 16 bits without a residual, whose threads have more elements than
# FEW_OF_ROWS: (most elements of a thread, its registers). On an H200 (2026-11-29)
# layer_norm_quantized of 1024, 32 elements a thread, took 59.2 µs, and 77.1 without such a bound.
# rms_norm_quantized of 1024, 16 elements a thread, took as long with every bound.
FEW_OF_ROWS, MANY_ROWS = 16, ((MOST_OF_ROWS, 64),)
# A thread with more elements keeps rows of 16 bits packed while they are added up, by whether each
# row has a scale. On an H200 (2026-11-29), rms_norm and layer_norm of 12288 to 20480 in segments of
# one slice (bench/results/h200-quantized-hints.md).
MOST_UNPACKED = {False: 56, True: 64}
# The same for a sum of two tensors. That day add_rms_norm_quantized of bfloat16 rows of 16384 took
# 0.98 of the time by row and 0.94 by block with neither packed rows nor early weights, and that of
# 20480 as much; those of 12288 and 14336 took 1.00 to 1.01, and add_layer_norm_quantized 0.99 to
# 1.00 (the same page).
MOST_UNPACKED_SUM = 80
# A thread with more elements keeps y in 16 bits while the largest of a row is found, by whether the
# plain norm reads its weights with the row. A quantised norm does not do so, and a thread has their
# registers for y. rms_norm_quantized of 32768 by row took 98 µs with y in float32, with the best
# hints, and 78 µs with y in 16 bits. That of 5120, whose threads have 40 elements, took 52 µs with
# y in float32, and those of 12288 and more were timed with y in 16 bits.
MOST_OUTPUT_UNPACKED = {False: 32, True: 40}
