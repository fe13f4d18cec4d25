"""Measured on an NVIDIA H200 (driver 580.159, tileiras 13.4.92, cuda-tile 1.7.0), 2026-11-21.

64 Mi elements, cold L2, CUDA graph replay. The comments give GB/s of what the mathematics reads and
writes, each tensor once, the column sum in the time; a device-to-device copy moves 4158 in 16 bit
and 4234 in float32. Where one figure stands it is that of the largest size; (N) names another.

A table lists (largest hidden size served, configuration), ascending. Its key is the operation and
the bytes of an element; heuristics.py says which operation stands for which.
"""

from ..config import Backward, Forward, Hints

# (kernel, operation, bytes, hidden size): bytes a thread that the compiler spills, where every
# configuration without spills that was timed is slower.
SPILLS = {
    ("norm_forward", "layer_norm", 2, 262144): 32,
    ("norm_forward", "add_layer_norm", 2, 32768): 16,
    ("norm_forward", "gated_rms_norm", 2, 5120): 8,
    ("norm_forward", "gated_rms_norm", 2, 262144): 40,
    ("norm_forward", "rms_norm", 4, 262144): 32,
    ("norm_forward", "add_layer_norm", 4, 7168): 48,
    ("norm_forward", "add_layer_norm", 4, 16384): 88,
    ("norm_backward", "rms_norm", 2, 1024): 8,
    ("norm_backward", "rms_norm", 2, 2048): 16,
    ("norm_backward", "rms_norm", 2, 6144): 8,
    ("norm_backward", "rms_norm", 2, 7168): 40,
    ("norm_backward", "rms_norm", 2, 16384): 40,
    ("norm_backward", "rms_norm", 2, 65536): 32,
    ("norm_backward", "layer_norm", 2, 12288): 24,
    ("norm_backward", "layer_norm", 2, 14336): 40,
    ("norm_backward", "layer_norm", 2, 65536): 8,
    ("norm_backward", "layer_norm", 2, 262144): 8,
    ("norm_backward", "add_rms_norm", 2, 6144): 112,
    ("norm_backward", "add_rms_norm", 2, 16384): 80,
    ("norm_backward", "add_rms_norm", 2, 262144): 8,
    ("norm_backward", "add_layer_norm", 2, 12288): 32,
    ("norm_backward", "add_layer_norm", 2, 20480): 56,
    ("norm_backward", "add_layer_norm", 2, 262144): 72,
    ("norm_backward", "gated_rms_norm", 2, 2048): 16,
    ("norm_backward", "gated_rms_norm", 2, 3072): 16,
    ("norm_backward", "gated_rms_norm", 2, 5120): 16,
    ("norm_backward", "gated_rms_norm", 2, 20480): 104,
    ("norm_backward", "gated_rms_norm", 2, 262144): 8,
    ("norm_backward", "gate_first", 2, 64): 8,
    ("norm_backward", "gate_first", 2, 1536): 8,
    ("norm_backward", "gate_first", 2, 2048): 8,
    ("norm_backward", "gate_first", 2, 3072): 8,
    ("norm_backward", "gate_first", 2, 4096): 88,
    ("norm_backward", "gate_first", 2, 7168): 96,
    ("norm_backward", "gate_first", 2, 8192): 72,
    ("norm_backward", "gate_first", 2, 262144): 16,
    ("norm_backward", "rms_norm", 4, 32768): 64,
    ("norm_backward", "rms_norm", 4, 262144): 64,
    ("norm_backward", "layer_norm", 4, 16384): 104,
    ("norm_backward", "layer_norm", 4, 262144): 16,
    ("norm_backward", "add_rms_norm", 4, 262144): 32,
    ("norm_backward", "add_layer_norm", 4, 1536): 8,
    ("norm_backward", "add_layer_norm", 4, 10240): 8,
    ("norm_backward", "add_layer_norm", 4, 12288): 16,
}


def _tma(widths: tuple[int, ...], occupancy: int, warps: int, store: bool = False) -> Forward:
    """A persistent grid that reads by tile loads."""
    return Forward(1, Hints(occupancy, warps), widths, loop=True, tma=True, store=store)


def _loop(rows: int, occupancy: int, widths: tuple[int, ...] | None = None) -> Forward:
    """A persistent grid that reads by gathers."""
    return Forward(rows, Hints(occupancy), widths, loop=True)


def _packed(occupancy: int | None = None, warps: int | None = None) -> Forward:
    """A row a block, in its own 16 bits over the sums."""
    return Forward(1, Hints(occupancy, warps), packed=True)


def _chunk(width: int, occupancy: int | None = None, packed: bool = False) -> Forward:
    """A chunk of a row a block."""
    return Forward(1, Hints(occupancy), (width,), packed=packed)


def _rows(width: int, rows: int, occupancy: int) -> Backward:
    return Backward((width,), rows, hints=Hints(occupancy))


def _tile(widths: tuple[int, ...], occupancy: int, warps: int, store: bool = False) -> Backward:
    """A row at a time by tile loads."""
    return Backward(widths, tma=True, hints=Hints(occupancy, warps), store=store)


def _reread(widths: tuple[int, ...], packed: bool = False) -> Backward:
    """The same, one block a multiprocessor, with weights that leave their registers to the row."""
    return Backward(widths, tma=True, hints=Hints(1, 8), packed=packed, reread=True)


def _wide(widths: tuple[int, ...], occupancy: int) -> Backward:
    """A row at a time by gathers, on twice the threads."""
    return Backward(widths, hints=Hints(occupancy, 8))


def _chunks(width: int, occupancy: int, warps: int | None = None, packed: bool = False) -> Backward:
    """A chunk of rows a block."""
    return Backward((width,), hints=Hints(occupancy, warps), packed=packed)


FORWARD = {
    ("rms_norm", 2): (
        (32, Forward(64, Hints(8))),  # 3993
        (64, Forward(32, Hints(8))),  # 3997
        (128, Forward(8)),  # 4017
        (512, Forward(8, Hints(8))),  # 4001 (256), 3980
        (768, Forward(4)),
        (1024, Forward(8, widths=(256, 256, 256, 256))),  # 4018
        (1536, Forward(2)),  # 4061
        (2048, Forward(1, Hints(8))),  # 4073
        (3072, Forward()),  # 4086
        (4096, Forward(1, Hints(None, 8))),  # 4044
        (5120, Forward(widths=(4096, 1024))),  # 4035
        (6144, Forward()),
        (7168, Forward(widths=(4096, 2048, 1024))),  # 4046
        (12288, Forward()),  # 3987 (8192), 3972
        (16384, Forward(1, Hints(None, 8))),  # 3968
        (20480, _packed(None, 8)),  # 3935
        (28672, _packed(3)),  # 3863
        (32768, _packed()),  # 3810
        (262144, _chunk(8192, 6, packed=True)),  # 3715 (65536), 3674 (131072)
    ),
    ("layer_norm", 2): (
        (64, Forward(64, Hints(8))),  # 3741 (32), 3790
        (128, Forward(32, Hints(16))),  # 3827
        (256, Forward(16, Hints(8))),  # 3840
        (512, Forward(8, widths=(256, 256))),  # 3999
        (768, Forward(8, widths=(256, 256, 256))),
        (1024, Forward(8, widths=(256, 256, 256, 256))),  # 4017
        (1536, _loop(1, 8, (1024, 512))),  # 3780
        (2048, Forward(2, widths=(1024, 1024))),  # 3880
        (3072, Forward(1, Hints(8), (1024, 1024, 1024))),  # 4031
        (4096, Forward(1, Hints(8))),  # 3959
        (5120, Forward(1, Hints(16))),  # 3941
        (6144, Forward(widths=(1024,) * 6)),
        (7168, Forward(widths=(1024,) * 7)),  # 3940
        (8192, Forward()),  # 3898
        (12288, Forward(1, Hints(4))),  # 3872
        (16384, _packed(4)),  # 3820
        (32768, _packed(1, 8)),  # 3769 (20480), 3784 (28672), 3752
        (262144, _chunk(8192, 6, packed=True)),  # 3029 (65536), 2986 (131072)
    ),
    ("add_rms_norm", 2): (
        (64, Forward(32, Hints(8))),  # 4103 (32), 4100
        (128, Forward(8, Hints(12))),  # 4171
        (256, Forward(4)),  # 4154
        (512, Forward(2)),  # 4159
        (2048, Forward()),  # 4150 (1024), 4159 (1536), 4151
        (4096, Forward(1, Hints(8))),  # 4122 (3072), 4055
        (8192, Forward()),  # 4115 (5120), 4076 (7168), 4084
        (12288, _packed(None, 8)),  # 3989
        (16384, _packed(2)),  # 4022
        (20480, _tma((4096, 4096, 4096, 4096, 4096), 1, 8)),  # 3885
        (24576, _tma((4096, 4096, 4096, 4096, 4096, 4096), 1, 8)),  # 3760
        (262144, _chunk(4096, 8, packed=True)),  # 3635 (32768), 3615 (65536)
    ),
    ("add_layer_norm", 2): (
        (64, Forward(32, Hints(16))),  # 4038
        (128, Forward(8, Hints(16))),  # 4095
        (256, Forward(4)),  # 4073
        (512, Forward(2, Hints(4))),  # 4124
        (1024, Forward(1, Hints(16))),  # 4150
        (1536, Forward(widths=(1024, 512))),  # 4151
        (8192, Forward()),  # 4137 (2048), 4061 (4096), 4101 (5120), 3981 (7168), 4022
        (16384, _packed(None, 8)),  # 3978 (12288), 3918
        (32768, _chunk(4096, 8, packed=True)),  # 3271 (20480), 3235
        (262144, _chunk(4096, 6, packed=True)),  # 2863 (65536)
    ),
    ("gated_rms_norm", 2): (
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
        (8192, _tma((4096, 4096), 2, 8, store=True)),  # 4007
        (12288, _tma((4096, 4096, 4096), 2, 8, store=True)),  # 3983
        (262144, _chunk(8192, 4, packed=True)),  # 3656 (16384), 3647 (65536)
    ),
    ("rms_norm", 4): (
        (32, Forward(32, Hints(8))),  # 4070
        (64, Forward(16)),  # 4081
        (128, Forward(4)),  # 4122
        (512, Forward(4, Hints(8))),  # 4127 (256), 4145
        (16384, Forward()),  # 4155 (1024), 4055 (4096), 4045 (8192), 4016
        (32768, _chunk(4096, 6)),  # 3971
        (262144, _chunk(4096, 8)),  # 4027 (65536)
    ),
    ("layer_norm", 4): (
        (32, Forward(32)),  # 3943
        (64, Forward(16)),  # 3968
        (256, Forward(8)),  # 4038 (128), 3998
        (512, Forward(2, Hints(4))),  # 4097
        (1024, Forward(2, Hints(8))),  # 4099
        (1536, Forward(widths=(1024, 512))),  # 4143
        (20480, Forward()),  # 4061 (4096), 4037 (8192), 4007 (16384), 3966
        (262144, _chunk(4096, 6)),  # 3696 (24576), 3589 (32768), 3472 (65536)
    ),
    ("add_rms_norm", 4): (
        (64, Forward(16, Hints(8))),  # 4144
        (256, Forward(2, Hints(8))),  # 4196
        (7168, Forward(1, Hints(4))),  # 4210 (1024), 4165 (3072), 4108 (4096), 3971
        (8192, _tma((8192,), 2, 4)),  # 3909
        (12288, _tma((16384,), 2, 4)),  # 3915
        (16384, _tma((16384,), 1, 8)),  # 3922
        (262144, _chunk(4096, 8)),  # 3981 (20480), 3875 (65536)
    ),
    ("add_layer_norm", 4): (
        (64, Forward(8, Hints(8))),  # 4054
        (256, Forward(2, Hints(16))),  # 4187
        (4096, Forward()),  # 4211 (512), 4205 (1024), 4140 (3072), 4115
        (5120, Forward(1, Hints(8))),  # 4050
        (6144, _tma((4096, 2048), 2, 4)),
        (7168, _tma((4096, 2048, 1024), 2, 4)),  # 3870
        (8192, _tma((8192,), 1, 8)),  # 3840
        (16384, _tma((16384,), 1, 8)),  # 3872 (12288), 3897
        (262144, _chunk(2048, 6)),  # 3518 (20480), 3563 (65536)
    ),
}

BACKWARD = {
    ("rms_norm", 2): (
        (32, _rows(32, 64, 5)),  # 4003
        (64, _rows(64, 32, 5)),  # 4006
        (128, _rows(128, 16, 5)),  # 4013
        (256, _rows(256, 8, 5)),  # 3970
        (512, _rows(512, 4, 5)),  # 4026
        (1024, _rows(1024, 4, 3)),  # 4020
        (1536, Backward((1024, 512), 2, hints=Hints(4))),  # 3944
        (2048, _rows(2048, 1, 5)),  # 4004
        (3072, _rows(4096, 1, 3)),  # 3929
        (4096, _tile((4096,), 2, 8, store=True)),  # 4032
        (5120, _tile((1024,) * 5, 2, 4, store=True)),  # 4017
        (6144, _tile((4096, 2048), 2, 8, store=True)),  # 4009
        (7168, _tile((8192,), 2, 4)),  # 3709
        (8192, _wide((8192,), 1)),  # 3752
        (9216, _tile((8192, 1024), 1, 4)),  # 3486
        (10240, _tile((2048,) * 5, 1, 8, store=True)),  # 3896
        (12288, _tile((2048,) * 6, 1, 8, store=True)),  # 3986
        (14336, _tile((4096, 4096, 4096, 2048), 1, 8, store=True)),  # 3883
        (16384, _tile((8192, 8192), 1, 8)),  # 3927
        (65536, _chunks(2048, 4, 8, packed=True)),  # 2911 (32768), 2718
        (262144, _chunks(4096, 2, 8, packed=True)),  # 2515 (131072)
    ),
    ("layer_norm", 2): (
        (32, _rows(32, 64, 5)),  # 3855
        (64, _rows(64, 32, 5)),  # 3876
        (128, _rows(128, 16, 4)),  # 3745
        (256, _rows(256, 8, 5)),  # 3829
        (512, _rows(512, 4, 4)),  # 3653
        (1024, _rows(1024, 2, 4)),  # 3770
        (1536, Backward((1024, 512), hints=Hints(5))),  # 3700
        (2048, _rows(2048, 1, 4)),  # 3796
        (3072, _rows(4096, 1, 3)),  # 3796
        (4096, _wide((4096,), 2)),  # 3603
        (5120, _tile((4096, 1024), 2, 4, store=True)),  # 3629
        (6144, _wide((8192,), 1)),  # 3381
        (7168, _tile((8192,), 1, 8)),  # 3270
        (8192, _wide((8192,), 1)),  # 3584
        (9216, _tile((8192, 1024), 1, 8)),  # 3336
        (10240, _tile((8192, 2048), 1, 8, store=True)),  # 3481
        (12288, _tile((4096, 4096, 4096), 1, 8)),  # 3642
        (12800, _reread((4096, 4096, 4096, 512))),  # 3283
        (14336, _reread((4096, 4096, 4096, 2048))),  # 2697
        (16384, _reread((2048,) * 8, packed=True)),  # 2577
        (65536, _chunks(2048, 4, packed=True)),  # 2085 (32768), 1997
        (262144, _chunks(4096, 2, 8, packed=True)),  # 1800 (131072)
    ),
    ("add_rms_norm", 2): (
        (32, _rows(32, 64, 4)),  # 4117
        (64, _rows(64, 32, 4)),  # 4140
        (128, _rows(128, 16, 4)),  # 4138
        (256, _rows(256, 8, 5)),  # 4084
        (512, _rows(512, 4, 5)),  # 4127
        (1024, _rows(1024, 2, 5)),  # 4146
        (1536, Backward((1024, 512), hints=Hints(5))),  # 4134
        (2048, _tile((2048,), 2, 4, store=True)),  # 4200
        (3072, Backward((2048, 1024), hints=Hints(3))),  # 4124
        (4096, _tile((4096,), 2, 4, store=True)),  # 4165
        (5120, _tile((4096, 1024), 2, 8)),  # 4134
        (6144, _tile((2048, 2048, 2048), 2, 8, store=True)),  # 4049
        (8192, _tile((8192,), 1, 8, store=True)),  # 4009 (7168), 4143
        (9216, _tile((8192, 1024), 1, 8, store=True)),  # 3737
        (10240, _tile((2048,) * 5, 1, 8, store=True)),  # 4173
        (12288, _tile((8192, 4096), 1, 8)),  # 4112
        (14336, _tile((8192, 4096, 2048), 1, 8)),  # 4052
        (16384, _tile((4096,) * 4, 1, 8, store=True)),  # 3711
        (262144, _chunks(4096, 2, 8, packed=True)),  # 3458 (32768), 3163 (65536), 3056 (131072)
    ),
    ("add_layer_norm", 2): (
        (64, _rows(64, 32, 3)),  # 3922
        (128, _rows(128, 32, 2)),  # 4048
        (256, _rows(256, 8, 4)),  # 4018
        (512, _rows(512, 4, 4)),  # 4032
        (1024, _rows(1024, 2, 4)),  # 4023
        (1536, _rows(2048, 1, 4)),  # 3684
        (2048, _rows(2048, 1, 4)),  # 3984
        (3072, _tile((1024, 1024, 1024), 2, 4, store=True)),  # 3944
        (4096, _tile((4096,), 2, 4)),  # 4080
        (5120, _tile((4096, 1024), 2, 4, store=True)),  # 4078
        (8192, _tile((8192,), 1, 8, store=True)),  # 3912
        (10240, _tile((8192, 2048), 1, 8, store=True)),  # 3828
        (12288, _tile((4096, 4096, 4096), 1, 8)),  # 3945
        (20480, _chunks(4096, 2, packed=True)),  # 2706 (16384)
        (262144, _chunks(2048, 4, packed=True)),  # 2368 (32768)
    ),
    ("gated_rms_norm", 2): (
        (32, _rows(32, 64, 3)),  # 3978
        (64, _rows(64, 32, 3)),  # 3978
        (128, _rows(128, 16, 3)),  # 3968
        (256, _rows(256, 8, 4)),  # 4025
        (512, _rows(512, 4, 4)),  # 4002
        (1024, _rows(1024, 2, 4)),  # 4057
        (1536, Backward((1024, 512), 2, hints=Hints(3))),  # 4014
        (2048, _rows(2048, 2, 2)),  # 4023
        (3072, _tile((1024, 1024, 1024), 2, 4, store=True)),  # 4091
        (4096, _wide((4096,), 2)),  # 4409
        (5120, _tile((4096, 1024), 2, 4, store=True)),  # 4099
        (6144, _tile((2048, 2048, 2048), 1, 8, store=True)),  # 3818
        (7168, _tile((2048, 2048, 2048, 1024), 1, 8, store=True)),  # 3606
        (8192, _tile((2048,) * 4, 1, 8)),  # 3832
        (20480, _chunks(4096, 2, 8)),  # 3437 (12288), 3475 (16384)
        (262144, _chunks(2048, 3)),  # 3389 (16384), 3073 (65536)
    ),
    ("gate_first", 2): (
        (32, _rows(32, 64, 3)),  # 3955
        (64, _rows(64, 32, 3)),  # 3936
        (128, _rows(128, 16, 3)),  # 3937
        (256, _rows(256, 8, 4)),  # 3961
        (512, _rows(512, 4, 3)),  # 3856
        (1024, _rows(1024, 2, 3)),  # 3817
        (1536, Backward((1024, 512), hints=Hints(4))),  # 3760
        (2048, _rows(2048, 1, 3)),  # 3758
        (3072, _wide((2048, 1024), 2)),  # 3893
        (4096, _tile((2048, 2048), 2, 4, store=True)),  # 3808
        (5120, _tile((1024,) * 5, 1, 8, store=True)),  # 3578
        (6144, _tile((2048, 2048, 2048), 1, 8, store=True)),  # 3262
        (7168, _tile((2048, 2048, 2048, 1024), 1, 8, store=True)),  # 3068
        (8192, _tile((4096, 4096), 1, 8, store=True)),  # 3160
        (262144, _chunks(4096, 1, 8)),  # 2386 (16384), 2167 (65536)
    ),
    ("rms_norm", 4): (
        (64, _rows(64, 16, 5)),  # 4164
        (128, _rows(128, 8, 5)),  # 4176
        (256, _rows(256, 4, 5)),  # 4175
        (512, _rows(512, 2, 5)),  # 4181
        (1024, _rows(1024, 1, 5)),  # 4177
        (1536, _rows(2048, 2, 2)),  # 4159
        (2048, _tile((2048,), 2, 8)),  # 3997
        (3072, _rows(4096, 1, 2)),  # 4157
        (4096, _tile((4096,), 1, 4)),  # 4273
        (5120, _tile((4096, 1024), 1, 8)),  # 4053
        (6144, _tile((4096, 2048), 1, 8)),  # 4186
        (7168, _tile((4096, 2048, 1024), 1, 8)),  # 4216
        (8192, _tile((8192,), 1, 8, store=True)),  # 3960
        (9216, _tile((8192, 1024), 1, 8)),
        (10240, _tile((8192, 2048), 1, 8)),
        (12288, _tile((8192, 4096), 1, 8)),  # 3954
        (32768, _chunks(4096, 2, 8)),  # 4167 (16384), 3561
        (262144, _chunks(2048, 4)),  # 4098 (65536), 3602 (131072)
    ),
    ("layer_norm", 4): (
        (64, _rows(64, 16, 5)),  # 4132
        (128, _rows(128, 8, 5)),  # 4150
        (256, _rows(256, 4, 5)),  # 4160
        (512, _rows(512, 2, 5)),  # 4162
        (1024, _rows(1024, 1, 5)),  # 4149
        (1536, _rows(2048, 2, 2)),  # 4154
        (2048, _tile((2048,), 2, 8)),  # 4256
        (3072, _rows(4096, 1, 2)),  # 4136
        (4096, _tile((4096,), 1, 4)),  # 4239
        (5120, _tile((4096, 1024), 1, 8)),  # 4019
        (6144, _tile((4096, 2048), 1, 8)),  # 4160
        (7168, _tile((4096, 2048, 1024), 1, 8)),  # 4133
        (8192, _tile((2048,) * 4, 1, 8)),  # 3976
        (9216, _tile((8192, 1024), 1, 8)),
        (10240, _tile((8192, 2048), 1, 8)),
        (12288, _reread((2048,) * 6)),  # 3844
        (16384, _chunks(4096, 2, 8)),  # 3273
        (262144, _chunks(2048, 3)),  # 2898 (32768), 2411 (131072)
    ),
    ("add_rms_norm", 4): (
        (64, _rows(64, 16, 5)),  # 4248
        (128, _rows(128, 8, 5)),
        (256, _rows(256, 4, 5)),  # 4258
        (512, _rows(512, 2, 5)),  # 4264
        (1024, _rows(1024, 1, 5)),  # 4265
        (1536, _rows(2048, 1, 3)),  # 4266
        (2048, _tile((2048,), 1, 8)),  # 4300
        (3072, _tile((4096,), 1, 4)),  # 4293
        (4096, _tile((2048, 2048), 1, 8)),  # 4319
        (5120, _tile((4096, 1024), 1, 8)),  # 4166
        (6144, _tile((4096, 2048), 1, 8)),  # 4220
        (7168, _tile((4096, 2048, 1024), 1, 8)),  # 4243
        (8192, _tile((8192,), 1, 8)),  # 4166
        (10240, _tile((8192, 2048), 1, 8)),  # 4159
        (12288, _tile((8192, 4096), 1, 8)),  # 4144
        (262144, _chunks(2048, 3)),  # 4118 (20480), 4095 (65536)
    ),
    ("add_layer_norm", 4): (
        (64, _rows(64, 16, 4)),  # 4203
        (128, _rows(128, 8, 4)),
        (256, _rows(256, 4, 4)),  # 4239
        (512, _rows(512, 4, 3)),  # 4257
        (1024, _rows(1024, 1, 4)),  # 4236
        (1536, _rows(2048, 1, 4)),  # 4279
        (2048, _tile((2048,), 2, 8)),  # 4315
        (3072, _tile((4096,), 1, 4)),  # 4303
        (4096, _tile((4096,), 1, 8)),  # 4294
        (5120, _tile((4096, 1024), 1, 4)),  # 4154
        (6144, _tile((4096, 2048), 1, 8)),  # 4225
        (7168, _tile((8192,), 1, 8)),  # 4130
        (8192, _tile((4096, 4096), 1, 8)),  # 4108
        (10240, _tile((8192, 2048), 1, 8)),  # 4091
        (12288, _reread((2048,) * 6)),  # 4062
        (262144, _chunks(2048, 2, 8)),  # 2900 (20480), 2715 (65536)
    ),
}
