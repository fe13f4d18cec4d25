"""Measured on an NVIDIA H200 (driver 580.159, tileiras 13.4.92, cuda-tile 1.7.0), 2026-11-22.

Measured with 64 Mi elements, cold L2 and CUDA graph replay. The comments give GB/s. The bytes are
those of the mathematics: each tensor is read or written once. The time includes the column sum. A
device-to-device copy moved 4051 to 4234 GB/s. A single number is for the largest size of its row;
a number followed by (N) is for size N. "a → b" means: the tuner measured a for the previous
configuration and b for this one, on 2026-11-23. The tuner's numbers are about 2% below those of a
graph. A previous configuration that the tuner dropped first has only three to six samples.

The key of a table is (operation, bytes of an element). A table lists (largest hidden size served,
configuration) in ascending order. A narrower row leaves out the segments that it does not reach.
None means: use the rules of heuristics.py. heuristics.py also says which operation's table serves a
spec.
"""

from dataclasses import replace

from ..config import Backward, Hints, RowForward, SharedForward, StreamForward

# (kernel, operation, bytes of an element, hidden size): bytes that each thread spills. Every
# configuration without spills that was timed was slower than these, before sums had an order.
SPILLS = {
    ("row_forward", "rms_norm", 2, 20480): 24,
    ("row_forward", "layer_norm", 2, 128): 8,
    ("shared_forward", "layer_norm", 2, 262144): 48,
    ("shared_forward", "add_rms_norm", 2, 32768): 16,
    ("shared_forward", "add_rms_norm", 2, 49152): 72,
    ("shared_forward", "gated_rms_norm", 2, 20480): 72,
    ("shared_forward", "gated_rms_norm", 2, 262144): 176,
    ("stream_forward", "gate_first", 2, 5120): 8,
    ("row_forward", "gate_first", 2, 12288): 16,
    ("shared_forward", "gate_first", 2, 262144): 144,
    ("shared_forward", "layer_norm", 4, 262144): 40,
    ("shared_forward", "gated_rms_norm", 4, 10240): 16,
    ("norm_backward", "rms_norm", 2, 32): 8,
    ("norm_backward", "rms_norm", 2, 64): 8,
    ("norm_backward", "rms_norm", 2, 2048): 16,
    ("norm_backward", "rms_norm", 2, 6144): 64,
    ("norm_backward", "rms_norm", 2, 14336): 24,
    ("norm_backward", "rms_norm", 2, 16384): 40,
    ("norm_backward", "rms_norm", 2, 262144): 88,
    ("norm_backward", "layer_norm", 2, 12288): 24,
    ("norm_backward", "layer_norm", 2, 14336): 248,
    ("norm_backward", "layer_norm", 2, 262144): 24,
    ("norm_backward", "add_rms_norm", 2, 128): 8,
    ("norm_backward", "add_rms_norm", 2, 6144): 136,
    ("norm_backward", "add_rms_norm", 2, 10240): 16,
    ("norm_backward", "add_rms_norm", 2, 16384): 88,
    ("norm_backward", "add_layer_norm", 2, 12288): 32,
    ("norm_backward", "add_layer_norm", 2, 65536): 8,
    ("norm_backward", "add_layer_norm", 2, 262144): 32,
    ("norm_backward", "gated_rms_norm", 2, 3072): 8,
    ("norm_backward", "gated_rms_norm", 2, 4096): 24,
    ("norm_backward", "gated_rms_norm", 2, 5120): 16,
    ("norm_backward", "gated_rms_norm", 2, 8192): 16,
    ("norm_backward", "gated_rms_norm", 2, 20480): 104,
    ("norm_backward", "gated_rms_norm", 2, 262144): 80,
    ("norm_backward", "gate_first", 2, 1536): 8,
    ("norm_backward", "gate_first", 2, 2048): 16,
    ("norm_backward", "gate_first", 2, 4096): 112,
    ("norm_backward", "gate_first", 2, 6144): 24,
    ("norm_backward", "gate_first", 2, 7168): 16,
    ("norm_backward", "gate_first", 2, 8192): 96,
    ("norm_backward", "rms_norm", 4, 8192): 8,
    ("norm_backward", "rms_norm", 4, 262144): 32,
    ("norm_backward", "layer_norm", 4, 262144): 96,
    ("norm_backward", "add_rms_norm", 4, 20480): 48,
    ("norm_backward", "add_rms_norm", 4, 65536): 40,
    ("norm_backward", "add_layer_norm", 4, 12288): 16,
    ("norm_backward", "add_layer_norm", 4, 262144): 64,
    ("norm_backward", "gated_rms_norm", 4, 20480): 40,
    ("norm_backward", "gated_rms_norm", 4, 262144): 24,
    ("norm_backward", "gate_first", 4, 262144): 32,
}


def _tma(widths: tuple[int, ...], occupancy: int, warps: int, store: bool = False) -> StreamForward:
    """A persistent grid that reads by tile loads."""
    return StreamForward(1, Hints(occupancy, warps), widths, tma=True, store=store)


def _loop(rows: int, occupancy: int, widths: tuple[int, ...] | None = None) -> StreamForward:
    """A persistent grid that reads by gathers."""
    return StreamForward(rows, Hints(occupancy), widths)


def _packed(
    occupancy: int | None = None, warps: int | None = None, widths: tuple[int, ...] | None = None
) -> RowForward:
    """Each block handles one row, which stays in 16 bits while it is summed."""
    return RowForward(1, Hints(occupancy, warps), widths, packed=True)


def _fetch(
    widths: tuple[int, ...] | None,
    occupancy: int | None = None,
    warps: int | None = None,
    packed: bool = False,
) -> RowForward:
    """Each block handles one row, and reads the weights with the row."""
    return RowForward(1, Hints(occupancy, warps), widths, packed=packed, fetch=True)


def _chunk(
    widths: tuple[int, ...],
    occupancy: int,
    warps: int | None = None,
    packed: bool = False,
    together: int = 1,
) -> SharedForward:
    """Each block handles one chunk of a row."""
    return SharedForward(Hints(occupancy, warps), widths, packed=packed, together=together)


def _gather(
    widths: tuple[int, ...],
    occupancy: int,
    warps: int | None = None,
    rows: int = 1,
    packed: bool = False,
    reread: bool = False,
) -> Backward:
    """Gathers read rows, or chunks of a row."""
    return Backward(widths, rows, hints=Hints(occupancy, warps), packed=packed, reread=reread)


def _tile(widths: tuple[int, ...], occupancy: int, warps: int, store: bool = False) -> Backward:
    """Tile loads read one row at a time."""
    return Backward(widths, tma=True, hints=Hints(occupancy, warps), store=store)


def _reread(
    widths: tuple[int, ...], occupancy: int = 1, warps: int = 8, store: bool = False
) -> Backward:
    """Tile loads read one row at a time, and each row reads the weights again."""
    return replace(_tile(widths, occupancy, warps, store), reread=True)


# Whole rows with a gate, after the norm or before.
GATED_2 = (
    (32, _loop(64, 6)),  # 3992
    (64, _loop(32, 6)),  # 4053
    (128, _loop(16, 6)),  # 4043
    (256, _loop(8, 6)),  # 4088
    (512, _loop(4, 6)),  # 4076
    (1024, _loop(2, 6)),  # 4101
    (1536, _loop(1, 6, (1024, 512))),  # 3895
    (2048, _loop(1, 6)),  # 4032
    (3072, _loop(1, 4, (2048, 1024))),  # 4129
    (4096, _tma((4096,), 3, 4)),  # 4133
    (5120, _tma((4096, 1024), 3, 4, store=True)),  # 3906
    (7168, _tma((8192,), 2, 4, store=True)),  # 4082
    (8192, RowForward(1, Hints(4, 8), (2048,) * 4)),  # 4069
    (12288, _packed(3, 8, (2048,) * 6)),  # 3927
)
FORWARD = {
    ("rms_norm", 2): (
        (32, RowForward(64, Hints(8))),  # 3993
        (64, RowForward(32, Hints(8))),  # 3997
        (128, RowForward(8)),  # 4017
        (256, RowForward(8, widths=(128, 128))),  # 4140
        (384, RowForward(8, widths=(128,) * 3)),  # 4108
        (512, RowForward(4, widths=(128,) * 4)),  # 4091
        (768, RowForward(4, widths=(256,) * 3)),  # 4101 (640), 4063
        (896, RowForward(4, widths=(256,) * 4)),  # 4085
        (1024, RowForward(2, widths=(256,) * 4)),  # 4086
        (1536, RowForward(1, Hints(8), (512, 512, 512))),  # 4021 (1152), 4079 (1280), 4055
        (2048, _fetch((1024, 1024))),  # 4110
        (3072, _fetch((1024, 1024, 1024), packed=True)),  # 4138
        (4096, RowForward(1, Hints(4, 8), (1024,) * 4)),  # 4032
        (5120, _fetch((1024,) * 5)),  # 4090
        (6144, _fetch((2048, 2048, 2048), None, 8)),  # 4121
        (7168, _fetch((1024,) * 7)),  # 4080
        (8192, _fetch((2048,) * 4, 3, 8)),  # 4056
        (10240, _fetch((2048,) * 5, 3, 8, packed=True)),  # 4097
        (12288, _fetch((4096,) * 3, 3, 8, packed=True)),  # 4054
        (14336, RowForward(1, Hints(None, 8))),  # 3979
        (16384, _fetch((4096,) * 4, 2, 8)),  # 3985
        (20480, _fetch((4096,) * 5, 2, 8)),  # 3863 → 3915
        (24576, _packed(2, 8)),  # 3772 → 3848
        (28672, _packed(3)),  # 3863
        # 3785 (32768), 3787 (49152), 3804 (65536), 3762 (131072)
        (262144, _chunk((1024,) * 8, 7, packed=True, together=4)),
    ),
    ("layer_norm", 2): (
        (64, RowForward(64, Hints(4))),  # 3741 (32), 3826 → 3881
        (128, RowForward(32, Hints(16))),  # 3827
        (256, RowForward(16, widths=(128, 128))),  # 3765 → 3909
        (384, RowForward(16, widths=(128,) * 3)),  # 3948
        (512, RowForward(8, widths=(256, 256))),  # 3999
        (768, RowForward(8, Hints(8, 8), (256, 256, 256))),  # 3675 (640), 3939 by the tuner
        (1024, RowForward(8, widths=(256, 256, 256, 256))),  # 4017
        (1536, RowForward(widths=(512,) * 3)),  # 3874
        (2048, RowForward(1, Hints(8), (512,) * 4)),  # 3969
        (3072, RowForward(1, Hints(8), (1024, 1024, 1024))),  # 4031
        (4096, RowForward(1, Hints(8))),  # 3959
        (5120, RowForward(1, Hints(4, 8), (1024,) * 5)),  # 3962
        (6144, RowForward(widths=(1024,) * 6)),
        (7168, RowForward(widths=(1024,) * 7)),  # 3940
        (8192, RowForward(1, Hints(3, 8), (2048,) * 4)),  # 3950
        (12288, RowForward(1, Hints(3, 8), (2048,) * 6)),  # 3879
        (16384, _packed(4)),  # 3820
        (32768, _packed(1, 8)),  # 3769 (20480), 3784 (28672), 3752
        # 3219 (49152), 3214 (65536), 3187 (131072)
        (262144, _chunk((1024,) * 8, 6, packed=True)),
    ),
    ("add_rms_norm", 2): (
        (64, RowForward(32, Hints(8))),  # 4103 (32), 4100
        (128, RowForward(8, Hints(12))),  # 4171
        (256, RowForward(4)),  # 4154
        (384, RowForward(8, widths=(128,) * 3)),  # 4135
        (512, RowForward(2)),  # 4159
        (1024, RowForward(2, widths=(512, 512))),  # 4131 (640), 4126
        (2048, RowForward()),  # 4159 (1536), 4151
        (3072, RowForward(1, Hints(8))),  # 4132
        (4096, _fetch((2048, 2048), None, 8)),  # 4073
        (8192, RowForward()),  # 4115 (5120), 4076 (7168), 4084
        (12288, _packed(4, 8, (4096, 4096, 4096))),  # 4026
        (16384, _fetch((4096,) * 4, 2, 8, packed=True)),  # 4053
        (20480, _fetch((4096,) * 5, 2, 8, packed=True)),  # 3948 → 3984
        (32768, _chunk((1024,) * 4, 6, together=2)),  # 3985 → 4005
        (49152, _chunk((4096, 4096), 5, 8, packed=True)),  # 3923 → 3964
        # 3937 → 3942 (65536), 3939 → 3945 (131072), 3820 → 3873
        (262144, _chunk((1024,) * 4, 7, packed=True, together=2)),
    ),
    ("add_layer_norm", 2): (
        (64, RowForward(32, Hints(16))),  # 4038
        (128, RowForward(8, Hints(16))),  # 4095
        (256, RowForward(4)),  # 4073
        (512, RowForward(2, Hints(4))),  # 4124
        (1024, RowForward(1, Hints(16))),  # 4150
        (1536, RowForward(widths=(1024, 512))),  # 4151
        (8192, RowForward()),  # 4137 (2048), 4061 (4096), 4101 (5120), 3981 (7168), 4030
        (12288, RowForward(1, Hints(3, 8), (4096,) * 3)),  # 4044
        (16384, _packed(3, 8, (4096,) * 4)),  # 3996
        (20480, _packed(2, 8, (4096,) * 5)),  # 3914
        (24576, _packed(2, 8, (4096,) * 6)),  # 3866
        # 3919 (32768), 3679 (65536), 3674 (131072)
        (262144, _chunk((1024,) * 4, 7, packed=True)),
    ),
    ("gated_rms_norm", 2): (
        *GATED_2,
        (20480, _chunk((2048, 2048), 8, packed=True)),  # 3695 (16384), 3451
        # 3796 (32768), 3748 (65536), 3747 (131072)
        (262144, _chunk((1024,) * 8, 5, packed=True, together=2)),
    ),
    ("gate_first", 2): (
        *GATED_2,
        (262144, _chunk((4096,), 7, packed=True)),  # 3464 (16384), 3327 (32768), 3150 (131072)
    ),
    ("rms_norm", 4): (
        (32, RowForward(32, Hints(8))),  # 4070
        (64, RowForward(16)),  # 4081
        (128, RowForward(4)),  # 4122
        (256, RowForward(4, Hints(8))),  # 4127
        (512, RowForward(2)),  # 4151 → 4198
        (3072, RowForward()),  # 4155 (1024)
        (4096, _fetch((2048, 2048), 6, 8)),  # 4032 → 4101
        (5120, _fetch((1024,) * 5)),  # 4119
        (6144, _fetch((2048,) * 3, 3, 8)),  # 4102
        (7168, _fetch((1024,) * 7, 3, 8)),  # 4098
        (8192, _fetch((2048,) * 4, None, 8)),  # 4113
        (12288, _fetch((2048,) * 6, None, 8)),
        (16384, RowForward(1, Hints(None, 8), (4096,) * 4)),  # 4030
        # 4002 (32768), 4026 (65536), 3924 (131072)
        (262144, _chunk((512,) * 8, 8, together=4)),
    ),
    ("layer_norm", 4): (
        (32, RowForward(32)),  # 3943
        (64, RowForward(16)),  # 3968
        (256, RowForward(8)),  # 4038 (128), 3998
        (512, RowForward(2, Hints(4))),  # 4097
        (1024, RowForward()),  # 4119 → 4137
        (1536, RowForward(widths=(1024, 512))),  # 4143
        (3072, RowForward()),
        (4096, RowForward(widths=(1024,) * 4)),  # 4040 → 4069
        (5120, RowForward()),
        (6144, RowForward(widths=(1024,) * 6)),  # 4009 → 4062
        (7168, RowForward()),
        (8192, RowForward(1, Hints(None, 8), (4096, 4096))),  # 4016 → 4061
        (20480, RowForward()),  # 4007 (16384), 3966
        (262144, _chunk((4096,), 6)),  # 3375 (32768), 3656 (65536), 3375 (131072)
    ),
    ("add_rms_norm", 4): (
        (64, RowForward(16, Hints(8))),  # 4144
        (256, RowForward(2, Hints(8))),  # 4196
        (4096, RowForward(1, Hints(4))),  # 4210 (1024), 4165 (3072), 4108
        (5120, RowForward(1, Hints(2, 8), (1024,) * 5)),  # 4101
        (6144, _fetch((2048,) * 3, 3, 8)),  # 4142
        (7168, _fetch((1024,) * 7, 3, 8)),  # 4098
        (8192, _fetch((2048,) * 4, 3, 8)),  # 4131
        # 4073 → 4107 (12288), 4006 → 4090 (16384), 4016 → 4091
        (20480, _chunk((2048, 2048), 5, 8)),
        (262144, _chunk((512,) * 4, 8)),  # 4088 (32768), 4010 (131072)
    ),
    ("add_layer_norm", 4): (
        (64, RowForward(8, Hints(8))),  # 4054
        (256, RowForward(2, Hints(16))),  # 4187
        (4096, RowForward()),  # 4211 (512), 4205 (1024), 4140 (3072), 4115
        (5120, RowForward(1, Hints(8))),  # 4050
        (6144, RowForward(1, Hints(2, 8), (2048,) * 3)),  # 4126
        (7168, RowForward(1, Hints(3, 8), (1024,) * 7)),  # 4049
        (8192, RowForward(1, Hints(2, 8), (4096, 4096))),  # 4105
        (12288, RowForward(1, Hints(2, 8), (2048,) * 6)),  # 4028
        (16384, RowForward(1, Hints(2, 8), (4096,) * 4)),  # 4013
        (262144, _chunk((512,) * 4, 8)),  # 3936 (32768), 3660 (131072)
    ),
    ("gated_rms_norm", 4): (
        (8192, None),  # 4322 (2048), 4148 (4096), 4261
        (262144, _chunk((2048,), 10)),  # 4274 (12288), 4272 (16384), 4317 (32768), 4005 (131072)
    ),
    ("gate_first", 4): (
        (8192, None),  # 4330 (2048), 4301 (4096), 4046
        (262144, _chunk((1024, 1024), 8)),  # 4082 (65536)
    ),
}

BACKWARD = {
    ("rms_norm", 2): (
        (32, _gather((32,), 5, rows=64)),  # 4008
        (64, _gather((64,), 5, rows=32)),  # 4040
        (128, _gather((128,), 5, rows=16)),  # 4042
        (256, _gather((256,), 5, rows=8)),  # 3903
        (384, _gather((128,) * 3, 5, rows=4)),  # 3834
        (512, _gather((512,), 5, rows=4)),  # 3899
        (768, _gather((256,) * 3, 5, rows=2)),  # 3847
        (1024, _gather((512, 512), 5, rows=2)),  # 3982
        (1536, _gather((512,) * 3, 6)),  # 3996
        (2048, _gather((2048,), 5)),  # 4039
        (3072, _gather((1024,) * 3, 3)),  # 3985
        (4096, _tile((4096,), 2, 8, store=True)),  # 4032
        (5120, _tile((1024,) * 5, 2, 4, store=True)),  # 4017
        (6144, _tile((2048,) * 3, 2, 8, store=True)),  # 4007
        (7168, _tile((1024,) * 7, 2, 4)),  # 3976
        (8192, _reread((2048,) * 4, 2, 4)),  # 3717 → 3821
        (10240, _tile((2048,) * 5, 1, 8, store=True)),  # 3513 → 3661 (9216), 3896
        (12288, _tile((2048,) * 6, 1, 8, store=True)),  # 3986
        (14336, _tile((4096, 4096, 4096, 2048), 1, 8, store=True)),  # 3883
        (16384, _tile((8192, 8192), 1, 8)),  # 3927
        # 3459 (20480), 3443 (32768), 3312 (65536), 3063 (131072)
        (262144, _gather((4096,), 3, packed=True)),
    ),
    ("layer_norm", 2): (
        (32, _gather((32,), 5, rows=64)),  # 3887
        (64, _gather((64,), 5, rows=32)),  # 3911
        (128, _gather((128,), 4, rows=16)),  # 3813
        (256, _gather((256,), 5, rows=8)),  # 3778
        (384, _gather((128,) * 3, 5, rows=4)),  # 3754
        (512, _gather((512,), 4, rows=4)),  # 3664
        (768, _gather((256,) * 3, 5, rows=2)),  # 3753
        (1024, _gather((512, 512), 4, 8, rows=2)),  # 3717 → 3843
        (1536, _gather((1024, 512), 5)),  # 3731
        (2048, _gather((1024, 1024), 4)),  # 3815
        (3072, _gather((1024,) * 3, 3)),  # 3818
        (4096, _gather((2048, 2048), 2, 8)),  # 3737
        (5120, _tile((4096, 1024), 2, 4, store=True)),  # 3668
        (6144, _reread((2048,) * 3, 2, 4)),  # 3304 → 3625
        (7168, _gather((2048, 2048, 2048, 1024), 1, 8)),  # 3425
        (8192, _gather((8192,), 1, 8)),  # 3536
        (9216, _tile((4096, 4096, 1024), 1, 8, store=True)),  # 3374
        (10240, _tile((8192, 2048), 1, 8, store=True)),  # 3481
        (12288, _tile((4096, 4096, 4096), 1, 8)),  # 3642
        (12800, _reread((4096, 4096, 4096, 512))),  # 3283
        (14336, _reread((2048,) * 7, store=True)),  # 2918
        # 2726 (16384), 2561 (20480), 2604 (32768), 2471 (65536), 2209 (131072)
        (262144, _gather((4096,), 2, 8, reread=True)),
    ),
    ("add_rms_norm", 2): (
        (32, _gather((32,), 4, rows=64)),  # 4113
        (64, _gather((64,), 4, rows=32)),  # 4157
        (128, _gather((128,), 4, rows=16)),  # 4164
        (256, _gather((256,), 5, rows=8)),  # 4097
        (384, _gather((128,) * 3, 5, rows=4)),  # 4119
        (512, _gather((512,), 5, rows=4)),  # 4110
        (1024, _gather((1024,), 5, rows=2)),  # 4160
        (1536, _gather((1024, 512), 5)),  # 4145
        (2048, _tile((2048,), 2, 4, store=True)),  # 4207
        (3072, _gather((2048, 1024), 3)),  # 4142
        (4096, _tile((4096,), 2, 4, store=True)),  # 4100
        (5120, _tile((4096, 1024), 2, 8)),  # 4140
        (6144, _tile((2048, 2048, 2048), 2, 8, store=True)),  # 4049
        (8192, _tile((8192,), 1, 8, store=True)),  # 4009 (7168), 4143
        (9216, _tile((8192, 1024), 1, 8, store=True)),  # 3737
        (10240, _tile((2048,) * 5, 1, 8, store=True)),  # 4173
        (12288, _tile((8192, 4096), 1, 8)),  # 4112
        (14336, _tile((8192, 4096, 2048), 1, 8)),  # 4052
        (16384, _tile((4096,) * 4, 1, 8, store=True)),  # 3711
        (20480, _gather((4096,), 2, 8, packed=True)),  # 3391
        (65536, _gather((1024, 1024), 4, packed=True)),  # 3606 (32768), 3373
        (262144, _gather((4096,), 2, 8, packed=True)),  # 3040 (131072)
    ),
    ("add_layer_norm", 2): (
        (64, _gather((64,), 3, rows=32)),  # 3934
        (128, _gather((128,), 2, rows=32)),  # 3904
        (256, _gather((256,), 4, rows=8)),  # 4001
        (512, _gather((512,), 4, rows=4)),  # 4028
        (1024, _gather((1024,), 4, rows=2)),  # 4080
        (1536, _gather((512,) * 3, 4)),  # 3964
        (2048, _gather((2048,), 4)),  # 4068
        (3072, _tile((1024, 1024, 1024), 2, 4, store=True)),  # 3944
        (4096, _tile((4096,), 2, 4)),  # 4080
        (5120, _tile((4096, 1024), 2, 4, store=True)),  # 4078
        (6144, _reread((2048,) * 3, 2, 4)),  # 3710 → 3972
        (7168, _tile((8192,), 1, 8, store=True)),  # 3704
        (8192, _tile((4096, 4096), 1, 8, store=True)),  # 3916
        (10240, _tile((8192, 2048), 1, 8, store=True)),  # 3828
        (12288, _tile((4096, 4096, 4096), 1, 8)),  # 3945
        # 2936 (16384), 2627 (32768), 2495
        (65536, _gather((4096,), 2, 8, packed=True, reread=True)),
        (262144, _gather((2048, 2048), 2, 8, packed=True, reread=True)),  # 2270 (131072)
    ),
    ("gated_rms_norm", 2): (
        (32, _gather((32,), 3, rows=64)),  # 4210
        (64, _gather((64,), 3, rows=32)),  # 4209
        (128, _gather((128,), 3, rows=16)),  # 4147
        (256, _gather((256,), 4, rows=8)),  # 4229
        (512, _gather((256, 256), 4, rows=4)),  # 4574
        (1024, _gather((256,) * 4, 4, rows=2)),  # 4616
        (1536, _gather((512,) * 3, 5)),  # 4454
        (2048, _gather((512,) * 4, 4)),  # 4403
        (3072, _gather((1024,) * 3, 3)),  # 4365
        (4096, _gather((4096,), 2, 8)),  # 4409
        (5120, _tile((4096, 1024), 2, 4, store=True)),  # 4099
        (6144, _gather((2048,) * 3, 1, 8)),  # 4071
        (7168, _tile((2048, 2048, 2048, 1024), 1, 8, store=True)),  # 3606
        (8192, _gather((2048,) * 4, 1, 8)),  # 4072
        (20480, _gather((4096,), 2, 8)),  # 3437 (12288), 3475 (16384)
        (262144, _gather((1024, 1024), 3)),  # 3053 (65536)
    ),
    ("gate_first", 2): (
        (32, _gather((32,), 3, rows=64)),  # 4180
        (64, _gather((64,), 3, rows=32)),  # 4152
        (128, _gather((128,), 3, rows=16)),  # 4207
        (256, _gather((256,), 4, rows=8)),  # 4071
        (512, _gather((512,), 3, rows=4)),  # 4187
        (1024, _gather((256,) * 4, 3, rows=2)),  # 4198
        (1536, _gather((1024, 512), 4)),  # 4241
        (2048, _gather((1024, 1024), 3)),  # 3832
        (3072, _gather((1024,) * 3, 2)),  # 4103
        (4096, _tile((2048, 2048), 2, 4, store=True)),  # 3808
        (5120, _tile((1024,) * 5, 1, 8, store=True)),  # 3578
        (6144, _gather((2048,) * 3, 1, 8)),  # 3410
        (7168, _gather((1024,) * 7, 1, 8)),  # 3390
        (8192, _tile((4096, 4096), 1, 8, store=True)),  # 3160
        (20480, _gather((4096,), 1, 8)),  # 2386 (16384)
        (262144, _gather((1024, 1024), 2)),  # 2265 (65536)
    ),
    ("rms_norm", 4): (
        (64, _gather((64,), 5, rows=16)),  # 4176
        (128, _gather((128,), 5, rows=8)),  # 4183
        (256, _gather((256,), 5, rows=4)),  # 4182
        (512, _gather((512,), 5, rows=2)),  # 4162
        (1024, _gather((1024,), 5)),  # 4078
        (1536, _gather((2048,), 2, rows=2)),  # 4189
        (2048, _tile((2048,), 2, 8)),  # 4240
        (3072, _gather((4096,), 2)),  # 4177
        (4096, _tile((4096,), 1, 4)),  # 4053
        (5120, _tile((4096, 1024), 1, 8)),  # 4117
        (6144, _tile((4096, 2048), 1, 8)),  # 4075
        (7168, _tile((1024,) * 7, 1, 8)),  # 4206
        (8192, _gather((2048,), 4, reread=True)),  # 4071 → 4171
        (9216, _tile((8192, 1024), 1, 8)),  # 3929
        # 4083 → 4142 (10240), 3980 → 4148 (12288), 3889 → 4166 (14336), 4047 → 4157 (16384),
        # 3906 → 4070 (32768), 3812 → 3943
        (65536, _gather((2048,), 4, reread=True)),
        (262144, _gather((4096,), 2, 8, reread=True)),  # 3585 → 3734 (131072), 2892 → 3308
    ),
    ("layer_norm", 4): (
        (64, _gather((64,), 5, rows=16)),  # 4137
        (128, _gather((128,), 5, rows=8)),  # 4167
        (256, _gather((256,), 5, rows=4)),  # 4162
        (512, _gather((512,), 5, rows=2)),  # 4157
        (1024, _gather((1024,), 5)),  # 4171
        (1536, _gather((2048,), 2, rows=2)),  # 4159
        (2048, _tile((2048,), 2, 8)),  # 4183
        (3072, _gather((4096,), 2)),  # 4120
        (4096, _tile((4096,), 1, 4)),  # 3885
        (5120, _tile((4096, 1024), 1, 8)),  # 3968
        (6144, _tile((2048,) * 3, 1, 8)),  # 4172
        (7168, _tile((1024,) * 7, 1, 8)),  # 4181
        (8192, _tile((2048,) * 4, 1, 8)),  # 3976
        (9216, _tile((1024,) * 9, 1, 8)),  # 4115
        (10240, _tile((8192, 2048), 1, 8)),  # 3994
        (12288, _reread((2048,) * 6)),  # 3802
        # 3894 (16384), 3817 (32768), 3627 (65536), 3239 (131072)
        (262144, _gather((4096,), 2, reread=True)),
    ),
    ("add_rms_norm", 4): (
        (64, _gather((64,), 5, rows=16)),  # 4251
        (128, _gather((128,), 5, rows=8)),  # 4260
        (256, _gather((256,), 5, rows=4)),  # 4252
        (512, _gather((512,), 5, rows=2)),  # 4269
        (1024, _gather((1024,), 5)),  # 4263
        (1536, _gather((2048,), 3)),  # 4260
        (2048, _tile((2048,), 1, 8)),  # 4295
        (3072, _gather((1024,) * 3, 2)),  # 4286
        (4096, _tile((2048, 2048), 1, 8)),  # 4280
        (5120, _gather((1024,) * 5, 1, 8)),  # 4286
        (6144, _gather((2048,) * 3, 1, 8)),  # 4292
        (7168, _tile((4096, 2048, 1024), 1, 8)),  # 4231
        (8192, _tile((8192,), 1, 8)),  # 4179
        (20480, _gather((2048,), 3)),  # 4176 → 4304 (10240), 4171 → 4324 (12288), 4118
        (65536, _gather((1024, 1024), 3)),  # 4224 (32768), 4161
        (262144, _gather((2048,), 3)),  # 3752 (131072)
    ),
    ("add_layer_norm", 4): (
        (64, _gather((64,), 4, rows=16)),  # 4220
        (128, _gather((128,), 4, rows=8)),  # 4229
        (256, _gather((256,), 4, rows=4)),  # 3692
        (512, _gather((512,), 3, rows=4)),  # 4230
        (1024, _gather((1024,), 4)),  # 4239
        (1536, _gather((512,) * 3, 3)),  # 4287
        (2048, _tile((2048,), 2, 8)),  # 4259
        (3072, _tile((4096,), 1, 4)),  # 4315
        (4096, _tile((1024,) * 4, 1, 8)),  # 4308
        (5120, _gather((1024,) * 5, 1, 8)),  # 4241
        (6144, _gather((2048,) * 3, 1, 8)),  # 4251
        (7168, _tile((1024,) * 7, 1, 8)),  # 4269
        (8192, _tile((4096, 4096), 1, 8)),  # 4106
        (10240, _tile((8192, 2048), 1, 8)),  # 4082
        (12288, _reread((2048,) * 6)),  # 4082
        # 3680 (32768), 3412 (65536), 3238 (131072)
        (262144, _gather((2048,), 3, reread=True)),
    ),
    ("gated_rms_norm", 4): (
        (8192, None),  # 4685 (2048), 4763 (4096), 4737
        (20480, _gather((2048,), 2)),  # 4125 (12288), 4144 (16384)
        (262144, _gather((1024, 1024), 3)),  # 4426 (65536)
    ),
    ("gate_first", 4): (
        (8192, None),  # 4696 (2048), 4752 (4096), 4425
        (262144, _gather((4096,), 1, 8)),  # 3661 (12288), 3672 (16384), 3406 (131072)
    ),
}

# What serves a size of BACKWARD instead: (that size, the fewest terms of dy, whether y is written
# once more, configuration), of which the last that fits counts. With two or three terms, or with y,
# the size's own configuration would spill more than 16 bytes, and more than SPILLS tells of one
# term. Compiled, not timed. The first choice was fewer blocks on a multiprocessor: with every term
# a block has more bytes on the way.
BACKWARD_OF_MORE = {
    ("rms_norm", 2): (
        (32, 3, True, _gather((32,), 4, rows=64)),
        (64, 3, True, _gather((64,), 4, rows=32)),
        (128, 2, True, _gather((128,), 4, rows=16)),
        (256, 2, True, _gather((256,), 4, rows=8)),
        (512, 3, True, _gather((512,), 4, rows=4)),
        (1024, 3, False, _gather((512, 512), 4, rows=2)),
        (1536, 2, False, _gather((512,) * 3, 5)),
        (2048, 2, False, _gather((2048,), 4)),
        (7168, 1, True, _reread((1024,) * 7, 2, 4)),
        (8192, 3, True, _tile((8192,), 1, 8, store=True)),
        (14336, 2, True, _reread((4096, 4096, 4096, 2048), store=True)),
        (16384, 3, False, replace(_reread((8192, 8192)), packed=True)),
        (16384, 1, True, replace(_reread((8192, 8192), store=True), packed=True)),
        (262144, 2, False, _gather((4096,), 2, packed=True)),
    ),
    ("add_rms_norm", 2): (
        (128, 3, True, _gather((128,), 3, rows=16)),
        (256, 2, False, _gather((256,), 4, rows=8)),
        (256, 1, True, _gather((256,), 4, rows=8)),
        (512, 2, False, _gather((512,), 4, rows=4)),
        (512, 1, True, _gather((512,), 4, rows=4)),
        (1024, 2, False, _gather((1024,), 4, rows=2)),
        (1024, 1, True, _gather((1024,), 4, rows=2)),
        (1536, 3, True, _gather((1024, 512), 4)),
        (3072, 3, False, _gather((2048, 1024), 2)),
        (5120, 1, True, _tile((4096, 1024), 2, 8, store=True)),
        (14336, 1, True, _reread((8192, 4096, 2048), store=True)),
        (16384, 1, True, replace(_reread((4096,) * 4, store=True), packed=True)),
        (20480, 3, False, _gather((4096,), 1, 8, packed=True)),
        (65536, 2, False, _gather((1024, 1024), 2, packed=True)),
        (262144, 3, False, _gather((4096,), 1, 8, packed=True)),
    ),
    ("layer_norm", 2): (
        (32, 3, False, _gather((32,), 4, rows=64)),
        (32, 1, True, _gather((32,), 3, rows=64)),
        (64, 3, False, _gather((64,), 4, rows=32)),
        (64, 1, True, _gather((64,), 3, rows=32)),
        (128, 1, True, _gather((128,), 3, rows=16)),
        (256, 3, False, _gather((256,), 4, rows=8)),
        (256, 1, True, _gather((256,), 3, rows=8)),
        (384, 3, True, _gather((128,) * 3, 4, rows=4)),
        (512, 3, True, _gather((512,), 3, rows=4)),
        (1024, 2, False, _gather((512, 512), 3, 8, rows=2)),
        (1536, 3, False, _gather((1024, 512), 4)),
        (1536, 2, True, _gather((1024, 512), 4)),
        (2048, 3, True, _gather((1024, 1024), 3)),
        (3072, 1, True, _gather((1024,) * 3, 2)),
        (4096, 3, True, _gather((2048, 2048), 1, 8)),
        (6144, 2, True, _reread((2048,) * 3, 1, 4)),
        (262144, 2, False, _gather((4096,), 1, 8, reread=True)),
    ),
    ("add_layer_norm", 2): (
        (128, 3, False, _gather((128,), 2, rows=32, packed=True)),
        (128, 1, True, _gather((128,), 1, 8, rows=32)),
        (256, 1, True, _gather((256,), 3, rows=8)),
        (512, 3, False, _gather((512,), 3, rows=4)),
        (512, 1, True, _gather((512,), 3, rows=4)),
        (1024, 2, True, _gather((1024,), 3, rows=2)),
        (2048, 2, False, _gather((2048,), 3)),
        (5120, 1, True, _reread((4096, 1024), 2, 4, store=True)),
        (6144, 2, True, _reread((2048,) * 3, 1, 4)),
        (65536, 2, False, _gather((4096,), 1, 8, packed=True, reread=True)),
        (262144, 2, False, _gather((2048, 2048), 1, 8, packed=True, reread=True)),
    ),
    ("gated_rms_norm", 2): (
        (256, 2, False, _gather((256,), 3, rows=8)),
        (3072, 3, False, _gather((1024,) * 3, 2)),
        (8192, 2, False, _gather((2048,) * 4, 1, 8, reread=True)),
    ),
    ("gate_first", 2): (
        (256, 2, False, _gather((256,), 3, rows=8)),
        (1024, 2, False, _gather((256,) * 4, 2, rows=2)),
        (4096, 2, False, _tile((2048, 2048), 2, 4)),
        (7168, 2, False, _gather((1024,) * 7, 1, 8, packed=True, reread=True)),
        (20480, 3, False, _gather((4096,), 1, 8, reread=True)),
    ),
    ("rms_norm", 4): (
        (8192, 1, True, _gather((2048,), 3, reread=True)),
        (8192, 2, False, _gather((2048,), 3, reread=True)),
        (65536, 1, True, _gather((2048,), 3, reread=True)),
        (65536, 2, False, _gather((2048,), 3, reread=True)),
        (262144, 2, False, _gather((4096,), 1, 8, reread=True)),
    ),
    ("add_rms_norm", 4): (
        (20480, 2, False, _gather((2048,), 2, reread=True)),
        (20480, 3, False, _gather((2048,), 2, 8)),
        (65536, 2, False, _gather((2048,), 2, reread=True)),
        (65536, 3, False, _gather((1024, 1024), 2, 8)),
        (262144, 2, False, _gather((2048,), 3, reread=True)),
        (262144, 2, True, _gather((2048,), 1, 8)),
        (262144, 3, False, _gather((2048,), 2, 8)),
    ),
    ("layer_norm", 4): (
        (9216, 3, False, _reread((1024,) * 9)),
        (10240, 3, False, _reread((8192, 2048))),
        (12288, 3, False, _reread((4096,) * 3)),
        (262144, 3, False, _gather((4096,), 1, 8, reread=True)),
    ),
    ("add_layer_norm", 4): (
        (512, 3, False, _gather((512,), 2, rows=4)),
        (6144, 3, False, _gather((2048,) * 3, 1, 8, reread=True)),
        (10240, 2, False, _reread((8192, 2048))),
        (262144, 2, False, _gather((2048,), 2, reread=True)),
        (262144, 3, False, _gather((2048,), 2, 8, reread=True)),
    ),
    ("gated_rms_norm", 4): (
        (20480, 2, False, _gather((2048,), 2, 8)),
        (262144, 2, False, _gather((1024, 1024), 2, 8)),
    ),
    ("gate_first", 4): (
        (262144, 2, False, _gather((2048,), 2, 8)),
        (262144, 3, False, _gather((2048,), 1, 8)),
    ),
}
