"""The orders in which norms add up a row: see launch/order.py.

By the norm and the bytes of an element of what is normalised, rows of (the largest row, warps of a
block or 0 for tiles of several rows, columns of a slice or 0 for the tile's width, columns of each
block that shares a row or 0). Tiles of several rows may have a fifth number: the elements of a row
that a thread reads at once, where they are fewer than a vector. The orders were chosen so that the
fewest configurations of the tables had to change. Those of FORWARD for 16-bit rows of 4096, of 5120
and from 32768 on, and for 32-bit rows of RMSNorm from 16384 on, were timed beside others on an H200
on 2026-11-29 (bench/results/h200-order-of-sums.md). Every architecture has the same orders. FORWARD
serves norms that have no gate and are not modulated. Where TILENORM_ONE_RESULT is set it serves
these, too, and BACKWARD serves.
"""

FORWARD = {
    ("rms", 2): (
        (128, 0, 0),
        (384, 0, 128),
        (896, 0, 256),
        (1280, 0, 512),
        (1536, 4, 512),
        (5120, 4, 1024),
        (6144, 8, 2048),
        (7168, 4, 1024),
        (20480, 8, 2048),
        (262144, 4, 1024, 8192),
    ),
    ("layer", 2): (
        (128, 0, 0),
        (384, 0, 128),
        (1024, 0, 256),
        (1536, 0, 512),
        (5120, 4, 1024),
        (6144, 8, 2048),
        (7168, 4, 1024),
        (24576, 8, 2048),
        (262144, 4, 1024, 8192),
    ),
    ("rms", 4): (
        (256, 0, 0),
        (512, 0, 512),
        (3072, 4, 512),
        (12288, 8, 1024),
        (262144, 4, 512, 4096),
    ),
    ("layer", 4): (
        (256, 0, 0),
        (512, 0, 512),
        (5120, 4, 512),
        (16384, 8, 1024),
        (262144, 4, 512, 4096),
    ),
}

BACKWARD = {
    ("rms", 2): (
        (256, 0, 0),
        (384, 0, 128, 0, 4),
        (512, 0, 0),
        (768, 0, 256, 0, 4),
        (1024, 0, 512),
        (1536, 4, 512),
        (3072, 4, 1024),
        (4096, 8, 2048),
        (5120, 4, 1024),
        (16384, 8, 2048),
        (262144, 8, 2048, 4096),
    ),
    ("layer", 2): (
        (256, 0, 0),
        (384, 0, 128, 0, 4),
        (512, 0, 0),
        (768, 0, 256, 0, 4),
        (1024, 0, 0),
        (1536, 4, 512),
        (3072, 4, 1024),
        (4096, 8, 2048),
        (6144, 4, 1024),
        (12288, 8, 2048),
        (262144, 8, 2048, 4096),
    ),
    ("rms", 4): (
        (16, 0, 0),
        (64, 0, 64),
        (512, 0, 0),
        (1536, 4, 512),
        (2048, 8, 1024),
        (3072, 4, 512),
        (7168, 8, 1024),
        (262144, 4, 512, 2048),
    ),
    ("layer", 4): (
        (16, 0, 0),
        (64, 0, 64),
        (512, 0, 0),
        (1536, 4, 512),
        (2048, 8, 1024),
        (3072, 4, 512),
        (12288, 8, 1024),
        (262144, 4, 512, 2048),
    ),
}
