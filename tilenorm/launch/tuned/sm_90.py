"""Measured on an NVIDIA H200 (driver 580.159, tileiras 13.4.92, cuda-tile 1.7.0), 2026-11-21.

64 Mi elements, cold L2, CUDA graph replay. The comments give GB/s, of x + y, or of x + dy + dx with
the column sum in the time, where a device-to-device copy moves 4158 in 16 bit and 4234 in float32.

A table lists (largest hidden size served, configuration), ascending. FORWARD is by the bytes of an
element, BACKWARD by them and by the number of sums over rows, one for dW, two for dW and dB.
"""

from ..config import Backward, Forward, Hints, Wide

# (kernel, bytes of an element, hidden size): bytes a thread that the compiler spills, where every
# configuration without spills that was timed is slower.
SPILLS = {
    ("norm_forward", 2, 32768): 176,
    ("norm_forward", 4, 32768): 376,
    ("norm_backward", 2, 3072): 8,
    ("norm_backward", 2, 12288): 56,
    ("norm_backward", 2, 16384): 56,
    ("norm_backward", 4, 16384): 232,
}

FORWARD = {
    (2, 1): (
        (32, Forward(rows=32, hints=Hints(8))),  # 4102
        (64, Forward(rows=16, hints=Hints(8))),  # 4094
        (256, Forward(rows=8)),  # 3967 at 128, 3951
        (512, Forward(rows=8, hints=Hints(4))),  # 4004
        (1024, Forward()),  # 3944
        (1536, Forward(hints=Hints(8))),  # 3902
        (32768, Forward()),  # 3959 at 4096, 3937 at 12288, 3868 at 16384, 3809 at 28672, 3375
        (262144, Wide()),  # 2616 at 65536, 2598
    ),
    (4, 1): (
        (32, Forward(rows=16)),
        (64, Forward(rows=8)),
        (128, Forward(rows=4)),  # 4091
        (256, Forward(rows=2)),  # 4073
        (512, Forward(rows=4)),  # 4133
        (32768, Forward()),  # 4131 at 1024, 4032 at 4096, 3988 at 16384, 3505
        (262144, Wide()),  # 2731 at 65536, 2727
    ),
}

BACKWARD = {
    (2, 2, 1): (
        (64, Backward((64,), rows=32, hints=Hints(4))),  # 3197; 64 rows: 3796, but spills
        (128, Backward((128,), rows=64, hints=Hints(2))),  # 3976
        (256, Backward((256,), rows=32, hints=Hints(2))),  # 3374
        (512, Backward((512,), rows=16, hints=Hints(2))),  # 3853
        (1024, Backward((1024,), rows=4, hints=Hints(3))),  # 4027
        (2048, Backward((2048,), rows=2, hints=Hints(3))),  # 3534 at 1536, 3999
        (3072, Backward((4096,), hints=Hints(3))),  # 3930
        (4096, Backward((4096,), tma=True, hints=Hints(2, 4))),  # 4079
        (5120, Backward((4096, 1024), tma=True, hints=Hints(2, 4))),  # 3842
        (6144, Backward((4096, 2048), tma=True, hints=Hints(2, 8))),  # 4028
        (7168, Backward((8192,), tma=True, hints=Hints(2, 4))),  # 3736
        (8192, Backward((4096, 4096), tma=True, hints=Hints(1, 8))),  # 3569
        (9216, Backward((8192, 1024), tma=True, hints=Hints(1, 8))),  # 3234
        (10240, Backward((8192, 2048), tma=True, hints=Hints(1, 8))),  # 3640
        (12288, Backward((8192, 4096), tma=True, hints=Hints(1, 8))),  # 3699
        (16384, Backward((16384,), tma=True, hints=Hints(1, 8))),  # 3363
        (65536, Wide(tile=4096, occupancy=4)),  # 2389 at 32768, 2352
        (262144, Wide(tile=2048, occupancy=3)),  # 2221 at 131072, 2151
    ),
    (2, 2, 2): (
        (64, Backward((64,), rows=32, hints=Hints(3))),
        (128, Backward((128,), rows=16, hints=Hints(3))),
        (256, Backward((256,), rows=16, hints=Hints(3))),  # 1919; 32 rows: 2524, but spills
        (512, Backward((512,), rows=16, hints=Hints(2))),  # 3049
        (1024, Backward((1024,), rows=4, hints=Hints(3))),  # 3885
        (2048, Backward((2048,), hints=Hints(4))),  # 3335 at 1536, 3722
        (3072, Backward((4096,), hints=Hints(3))),  # 3472
        (4096, Backward((4096,), tma=True, hints=Hints(2, 8))),  # 3535
        (5120, Backward((4096, 1024), tma=True, hints=Hints(2, 4))),  # 3717
        (8192, Backward((8192,), tma=True, hints=Hints(1, 8))),  # 3173 at 6144, 3469
        (9216, Backward((8192, 1024), tma=True, hints=Hints(1, 8))),  # 3485
        (10240, Backward((8192, 2048), tma=True, hints=Hints(1, 8))),  # 3550
        (12288, Backward((8192, 4096), tma=True, hints=Hints(1, 8))),  # 3405
        (32768, Wide(tile=2048, occupancy=4)),  # 2342 at 16384, 2305
        (262144, Wide(tile=2048, occupancy=3)),  # 2178 at 65536, 1915
    ),
    (4, 2, 1): (
        (64, Backward((64,), rows=32, hints=Hints(3))),
        (128, Backward((128,), rows=16, hints=Hints(4))),
        (256, Backward((256,), rows=8, hints=Hints(4))),  # 3903
        (512, Backward((512,), rows=2, hints=Hints(4))),  # 3922
        (1024, Backward((1024,), rows=2, hints=Hints(3))),  # 4027
        (1536, Backward((2048,), rows=2, hints=Hints(2))),  # 4200
        (2048, Backward((2048,), tma=True, hints=Hints(2, 8))),  # 3997
        (3072, Backward((4096,), hints=Hints(2))),  # 4157
        (4096, Backward((4096,), tma=True, hints=Hints(1, 4))),  # 4273
        (5120, Backward((4096, 1024), tma=True, hints=Hints(1, 8))),  # 4053
        (6144, Backward((4096, 2048), tma=True, hints=Hints(1, 8))),  # 4186
        (7168, Backward((4096, 2048, 1024), tma=True, hints=Hints(1, 8))),  # 4216
        (8192, Backward((4096, 4096), tma=True, hints=Hints(1, 8))),  # 3963
        (9216, Backward((8192, 1024), tma=True, hints=Hints(1, 8))),
        (10240, Backward((8192, 2048), tma=True, hints=Hints(1, 8))),
        (12288, Backward((8192, 4096), tma=True, hints=Hints(1, 8))),  # 3954
        (16384, Backward((8192, 8192), tma=True, hints=Hints(1, 8))),  # 3073 to 3515
        (262144, Wide(tile=2048, occupancy=4)),  # 2561 at 32768, 2455
    ),
    (4, 2, 2): (
        (64, Backward((64,), rows=32, hints=Hints(3))),
        (128, Backward((128,), rows=16, hints=Hints(4))),
        (256, Backward((256,), rows=8, hints=Hints(4))),  # 3887
        (512, Backward((512,), rows=2, hints=Hints(4))),  # 4098
        (1024, Backward((1024,), rows=2, hints=Hints(3))),  # 3994
        (1536, Backward((2048,), rows=2, hints=Hints(2))),  # 4174
        (2048, Backward((2048,), tma=True, hints=Hints(2, 8))),  # 4256
        (3072, Backward((4096,), hints=Hints(2))),  # 4136
        (4096, Backward((4096,), tma=True, hints=Hints(1, 4))),  # 4239
        (5120, Backward((4096, 1024), tma=True, hints=Hints(1, 8))),  # 4019
        (6144, Backward((4096, 2048), tma=True, hints=Hints(1, 8))),  # 4160
        (7168, Backward((4096, 2048, 1024), tma=True, hints=Hints(1, 8))),  # 4133
        (8192, Backward((4096, 4096), tma=True, hints=Hints(1, 8))),  # 3901
        (9216, Backward((8192, 1024), tma=True, hints=Hints(1, 8))),
        (10240, Backward((8192, 2048), tma=True, hints=Hints(1, 8))),
        (32768, Wide(tile=2048, occupancy=4)),
        (262144, Wide(tile=2048, occupancy=3)),
    ),
}
