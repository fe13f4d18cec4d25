"""Measured on an NVIDIA H200 (driver 580.159, tileiras 13.4.92, cuda-tile 1.7.0), 2026-11-21.

64 Mi elements, cold L2, CUDA graph replay; GB/s of x + y or x + dy + dx in the comments, beside a
device-to-device copy of 4158 in 16 bit and 4234 in float32. BACKWARD is the kernel alone.

Each table lists, by bytes of an element, (largest hidden size served, configuration), ascending.
"""

from ..config import Backward, Forward, Hints

FORWARD = {
    2: (
        (128, Forward(rows=16, hints=Hints(occupancy=8))),
        (512, Forward(rows=8, hints=Hints(occupancy=8))),  # 4105 at 256, 3997 at 512
        (8192, Forward()),  # 3993 at 1024, 4065 at 2048, 4012 at 4096, 3979 at 8192
        (12288, Forward(hints=Hints(occupancy=4))),  # 3956, against 3821 unhinted
        (32768, Forward()),  # 3894 at 16384, 3767 at 24576, 3429 at 32768
    ),
    4: (
        (128, Forward(rows=8, hints=Hints(occupancy=8))),
        (256, Forward(rows=4, hints=Hints(occupancy=8))),  # 4208
        (512, Forward(rows=2)),  # 4195
        (32768, Forward()),  # 4185 at 1024, 4062 at 4096, 4001 at 16384, 3556 at 32768
    ),
}

BACKWARD = {
    2: (
        (256, Backward((256,), rows=32, hints=Hints(occupancy=2))),  # 3192
        (512, Backward((512,), rows=16, hints=Hints(occupancy=2))),  # 3918
        (1024, Backward((1024,), rows=8, hints=Hints(occupancy=2))),  # 4093
        (2048, Backward((2048,), rows=2, hints=Hints(occupancy=3))),  # 4100, 3863 at 1536
        (3072, Backward((4096,), hints=Hints(occupancy=3))),  # 3994, by TMA 3823
        (4096, Backward((4096,), tma=True, hints=Hints(2, 8))),  # 4151, gathered 3942
        (5120, Backward((4096, 1024), tma=True, hints=Hints(2, 4))),  # 3962
        (6144, Backward((4096, 2048), tma=True, hints=Hints(2, 8))),  # 4053
        (7168, Backward((4096, 2048, 1024), tma=True, hints=Hints(2, 4))),  # 3492
        (8192, Backward((8192,), tma=True, hints=Hints(1, 8))),  # 3631
        (9216, Backward((8192, 1024), tma=True, hints=Hints(1, 8))),
        (10240, Backward((8192, 2048), tma=True, hints=Hints(1, 8))),
        (12288, Backward((8192, 4096), tma=True, hints=Hints(1, 8))),  # 3974, one tile 3336
        (16384, Backward((16384,), tma=True, hints=Hints(1, 8))),  # 3175
    ),
    4: (
        (256, Backward((256,), rows=8, hints=Hints(occupancy=4))),  # 4217
        (512, Backward((512,), rows=2, hints=Hints(occupancy=4))),  # 4134
        (1024, Backward((1024,), rows=2, hints=Hints(occupancy=3))),  # 4036
        (1536, Backward((2048,), rows=2, hints=Hints(occupancy=2))),  # 4212
        (2048, Backward((2048,), tma=True, hints=Hints(2, 8))),  # 4257
        (3072, Backward((4096,), hints=Hints(occupancy=2))),  # 4207
        (4096, Backward((4096,), tma=True, hints=Hints(1, 8))),  # 4113
        (5120, Backward((4096, 1024), tma=True, hints=Hints(1, 8))),  # 4155
        (8192, Backward((8192,), tma=True, hints=Hints(1, 8))),  # 3987
        (16384, Backward((16384,), tma=True, hints=Hints(1, 8))),  # 4017 at 12288, 3274
    ),
}
