"""How quantised norms are compiled, on every architecture.

Compiled for sm_90 by tileiras 13.4.92, 2026-11-24 and 25. Timed on an NVIDIA H200 (driver
580.159.04, tileiras 13.4.92, cuda-tile 1.7.0), 2026-11-25: see
bench/results/h200-quantized-hints.md.
"""

# The keys of both tables are those of sm_90.json: (the plain norm's operation, bytes of an
# element).
#
# The N for which no occupancy is known that keeps the plain norm's order of sums. For float32 from
# 5121 on none was looked for. All other N were compiled at three sizes of each entry of the table
# of sm_90, with y and without, for scales by row, by block and of the caller.
OUT_OF_ORDER = {
    ("layer_norm", 2): range(12289, 32769),
    ("add_layer_norm", 2): range(8193, 16385),
    ("layer_norm", 4): range(4097, 20481),
    ("add_layer_norm", 4): range(5121, 16385),
}
# The same for tiles of several rows, which the compiler adds up in one order in one kernel, and may
# add up in another order in another kernel. An H100 gave other bits for add_rms_norm of 64, and the
# machine code for sm_90 has two orders in rms_norm of 24 to 64, add_rms_norm of 40 to 64 and
# layer_norm of 96, 112, 768 and 776: see bench/results/h100-tests.md. float32 was not looked for.
TILES_OUT_OF_ORDER = {
    ("rms_norm", 2): range(17, 65),
    ("add_rms_norm", 2): range(17, 65),
    ("layer_norm", 2): (*range(81, 128), *range(737, 801)),
    ("rms_norm", 4): range(17, 65),
    ("add_rms_norm", 4): range(17, 65),
}
# For so many N, the occupancy that keeps the plain norm's order of sums. Without an occupancy the
# compiler chooses another order there.
IN_ORDER = {
    ("rms_norm", 2): ((range(20481, 28673), 2),),
    ("add_rms_norm", 2): ((range(4097, 8193), 2),),
    ("add_layer_norm", 2): ((range(1537, 8193), 2), (range(20481, 24577), 2)),
    ("layer_norm", 4): ((range(1537, 3073), 2),),
    ("add_layer_norm", 4): ((range(257, 4097), 2), (range(4097, 5121), 6)),
}
# For plain norms whose weights are read with the row, so that the order of sums is prescribed:
# (most elements of a thread, registers of a thread), by whether groups have a scale each. More
# blocks on a multiprocessor are faster until they spill. Timed for bfloat16 of 2048, 5120, 8192 and
# 16384.
FETCHED = {
    False: ((32, 48), (40, 64), (64, 80), (80, 128)),
    True: ((24, 48), (40, 64), (64, 80), (80, 128)),
}
# For blocks that share a row: (most elements of a thread, its least registers), by norm. Timed for
# rms_norm of bfloat16, 32768 and 65536. The others were only compiled.
SHARED = {"rms": ((32, 72), (64, 96)), "layer": ((32, 96), (64, 128))}
# A thread with more elements keeps rows of 16 bits packed while they are added up.
MOST_UNPACKED = 40
# A thread with more elements keeps y in 16 bits while the largest of a row is found.
# rms_norm_quantized of 32768 by row took 98 µs with y in float32, with the best hints, and 78 µs
# with y in 16 bits.
MOST_OUTPUT_UNPACKED = 32
