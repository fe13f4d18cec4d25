"""Every op as one row: the tensors that it takes and makes, with their dimensions, and its options.

From a row follow the op's schema, fake, implementations, derivative, autocast and sharding rules,
the checks of a call and their messages, and which array of the kernels each tensor is.
ops/passes/dims.py tells what the dimensions mean.
"""

from dataclasses import replace

from .row import Op, Option, Port, Stage

OPTIONS = {
    "offset": Option("float", 0.0),
    "rounding": Option("str", "late", ("late", "early")),
    "dropout_scale": Option("float", 1.0),
    "norm_before_gate": Option("bool", True),
    "activation": Option("str", "silu", ("silu", "sigmoid")),
    "scaling": Option("str", None, ("row", "block", "mx", "tensor")),
    "dtype": Option("ScalarType"),
    "power_of_2": Option("bool", False),
    "layout": Option("str"),
    "return_output": Option("bool", False),
    "return_amax": Option("bool", False),
    "rotary_dim": Option("SymInt"),
    "interleaved": Option("bool", False),
    "heads_first": Option("bool", False),
    "output_heads_first": Option("bool", False),
    "out_dtype": Option("ScalarType?"),
}
# The arguments of the ops that no public function has as an option, as in a schema.
ARGUMENTS = {
    "hidden": "SymInt hidden",
    "norm": "str norm",
    "gate_first": "bool gate_first",
    "shift": "str? shift",
    "eps": "float eps",
    "next_eps": "float next_eps",
    "added": "bool added",
    "save": "bool save",
    "backend": "str? backend=None",
    "output": "bool output=False",
    "input_dtype": "ScalarType? input_dtype=None",
}
ROUNDING = ("offset", "rounding")
PLAIN = (*ROUNDING, "out_dtype")
GATED = (*ROUNDING, "norm_before_gate", "activation", "out_dtype")
ADDED = (*ROUNDING, "dropout_scale", "out_dtype")
QUANTIZATION = ("scaling", "dtype", "power_of_2", "layout", "return_output", "return_amax")
QUANTIZED = (*ROUNDING, *QUANTIZATION)
ROTATION = ("rotary_dim", "interleaved", "output_heads_first")

# What ops take.
X = Port("input", role="x", needed=True, cast=True)
RESIDUAL = Port("residual", role="residual", needed=True)
ADDEND = Port("addend", role="addend", shown="residual[0]")
DROPOUT_MASK = Port("dropout_mask", role="dropout_mask", like="bool", grad=False)
LAYER_SCALE = Port("layer_scale", "n", "layer_scale")
SKIP = Port("residual", role="skip", needed=True, cast=True)
BRANCH = replace(SKIP, role="residual")  # of a chain
GATE = Port("gate", role="gate", needed=True)
WEIGHT = Port("weight", "[h] n", "weight")
BIAS = Port("bias", "[h] n", "bias", same="weight")
MOD_SCALE = Port("scale", "g n", "mod_scale", needed=True)
MOD_SHIFT = Port("shift", "g n", "mod_shift", same="scale")
MOD_GATE = Port("gate", "g n", "mod_gate", same="scale")
SUMMED = Port("residual", role="residual")  # of a modulated norm, which may have none
KEY = Port("key", "t k d", "key", cast=True, like="input")
HEAD_WEIGHT = Port("weight", "n", "weight")
KEY_WEIGHT = Port("key_weight", "n", "key_weight", of="key")
COS = Port("cos", "t? r", "cos", needed=True, indexed="p r", grad=False)
SIN = replace(COS, name="sin", role="sin", like="cos", same="cos")
POSITIONS = Port("positions", "t?", "positions", like="int32 int64", grad=False)
GIVEN = Port("given_scale", "1", "given_scale", shown="scale", grad=False)
INNER_W = replace(WEIGHT, role="inner_w")
INNER_B = replace(BIAS, role="inner_b")
NEXT_W = Port("next_weight", "[h] n", "weight")
NEXT_B = Port("next_bias", "[h] n", "bias", same="next_weight")

# What ops make.
Y = Port("output", role="y", like="input")
CAST_Y = replace(Y, like="out_dtype")
AFTER = replace(Y, like="residual")
SUM = Port("residual_out", role="sum", like="residual")
SUM_IF = replace(SUM, given="residual")
MEAN = Port("mean", "...", "mean", like="input", when="save", grad=False)
RSTD = replace(MEAN, name="rstd", role="rstd")
MEAN_SUM = replace(MEAN, like="input residual")
RSTD_SUM = replace(RSTD, like="input residual")
INNER_MEAN = replace(MEAN, role="inner_mean")
INNER_RSTD = replace(RSTD, role="inner_rstd")
NEXT_MEAN = replace(MEAN, name="next_mean", like="residual")
NEXT_RSTD = replace(RSTD, name="next_rstd", like="residual")
Q = Port("q", role="q", like="dtype", grad=False)
SCALE = Port("scale", "(...) n/group", "scale", like="scale", unless="given_scale", grad=False)
AMAX = Port("amax", "1", "amax", like="float32", when="return_amax", grad=False)
OUTPUT_IF = replace(Y, when="return_output")
TURNED = replace(Y, swapped="output_heads_first")
KEY_TURNED = replace(TURNED, name="key_output", role="key_y", of="key", given="key", like="key")
KEY_RSTD = replace(RSTD, name="key_rstd", role="key_rstd", of="key", given="key", like="key")

AFFINE = WEIGHT, BIAS
BRANCH_PORTS = DROPOUT_MASK, LAYER_SCALE  # what multiplies the input before it is added
TAKES_SUM = X, RESIDUAL, *AFFINE, ADDEND, *BRANCH_PORTS
TAKES_CODED = X, *AFFINE, GIVEN
TAKES_CODED_SUM = X, RESIDUAL, *AFFINE, ADDEND, GIVEN
TAKES_GROUPS = X, MOD_SCALE, MOD_SHIFT, *AFFINE, SUMMED, MOD_GATE
CODES = Q, SCALE, AMAX, OUTPUT_IF
# The stages of a chain. The second norm reads the sum that the first one writes.
RMS_STAGES = (
    Stage(
        "rms_norm_add",
        {"x": "input", "skip": "residual", "y": "residual_out", "weight": "weight", "rstd": "rstd"},
    ),
    Stage(
        "rms_norm",
        {"x": "residual_out", "y": "output", "weight": "next_weight", "rstd": "next_rstd"},
    ),
)
LAYER_STAGES = (
    Stage("layer_norm_add", {**RMS_STAGES[0].ports, "bias": "bias", "mean": "mean"}),
    Stage("layer_norm", {**RMS_STAGES[1].ports, "bias": "next_bias", "mean": "next_mean"}),
)

_ROWS = (
    Op("rms_norm", "rms", (X, *AFFINE), (CAST_Y, RSTD), PLAIN),
    Op("layer_norm", "layer", (X, *AFFINE), (CAST_Y, MEAN, RSTD), PLAIN),
    Op("add_rms_norm", "rms", TAKES_SUM, (CAST_Y, SUM, RSTD_SUM), ADDED),
    Op("add_layer_norm", "layer", TAKES_SUM, (CAST_Y, SUM, MEAN_SUM, RSTD_SUM), ADDED),
    Op("gated_rms_norm", "rms", (X, GATE, *AFFINE), (CAST_Y, RSTD), GATED),
    Op("gated_layer_norm", "layer", (X, GATE, *AFFINE), (CAST_Y, MEAN, RSTD), GATED),
    Op("rms_norm_add", "rms", (X, SKIP, *AFFINE), (AFTER, RSTD), ROUNDING),
    Op("layer_norm_add", "layer", (X, SKIP, *AFFINE), (AFTER, MEAN, RSTD), ROUNDING),
    Op("rms_norm_quantized", "rms", TAKES_CODED, (*CODES, RSTD), QUANTIZED),
    Op("layer_norm_quantized", "layer", TAKES_CODED, (*CODES, MEAN, RSTD), QUANTIZED),
    Op("add_rms_norm_quantized", "rms", TAKES_CODED_SUM, (*CODES, SUM, RSTD_SUM), QUANTIZED),
    Op(
        "add_layer_norm_quantized",
        "layer",
        TAKES_CODED_SUM,
        (*CODES, SUM, MEAN_SUM, RSTD_SUM),
        QUANTIZED,
    ),
    Op(
        "modulated_rms_norm",
        "rms",
        TAKES_GROUPS,
        (Y, SUM_IF, RSTD_SUM),
        backward="modulated_norm_backward",
    ),
    Op(
        "modulated_layer_norm",
        "layer",
        TAKES_GROUPS,
        (Y, SUM_IF, MEAN_SUM, RSTD_SUM),
        backward="modulated_norm_backward",
    ),
    Op(
        "rms_norm_add_rms_norm",
        "rms",
        (X, BRANCH, INNER_W, NEXT_W),
        (AFTER, SUM, INNER_RSTD, NEXT_RSTD),
        ROUNDING,
        RMS_STAGES,
    ),
    Op(
        "layer_norm_add_layer_norm",
        "layer",
        (X, BRANCH, INNER_W, INNER_B, NEXT_W, NEXT_B),
        (AFTER, SUM, INNER_MEAN, INNER_RSTD, NEXT_MEAN, NEXT_RSTD),
        ROUNDING,
        LAYER_STAGES,
    ),
    Op(
        "rms_norm_rope",
        "rms",
        (X, COS, SIN, HEAD_WEIGHT, KEY, KEY_WEIGHT, POSITIONS),
        (TURNED, KEY_TURNED, RSTD, KEY_RSTD),
        (*ROTATION, *ROUNDING),
        backward="rms_norm_rope_backward",
    ),
)
OPS = {op.name: op for op in _ROWS}

# The internal ops. SPEC: the fields of spec.Options.
SPEC = ("hidden", "norm", "offset", "gate_first", "rounding", "activation", "dropout_scale")
DY = Port("grad_output", role="dy", needed=True)
DSUM = Port("grad_sum", role="dsum")
TERMS = tuple(Port(f"grad_output_{i}", role=f"grad_output_{i}") for i in (2, 3, 4))
DTURNED = replace(DY, swapped="output_heads_first", needed=False)
DKEY_TURNED = replace(DTURNED, name="grad_key_output", role="dsum", of="key")
GATE_IF = replace(GATE, needed=False)
INPUT = Port("branch", role="input")  # where x is the sum
SAVED_RSTD = replace(RSTD, needed=True)
STATISTICS = MEAN, SAVED_RSTD
SAVED_KEY_RSTD = Port("key_rstd", "...", "key_rstd", of="key")
# Gradients. Those of what rows share add up over the rows.
DX = Port("grad_input", role="x")
DRESIDUAL = Port("grad_residual", role="residual")
DGATE = Port("grad_gate", role="gate")
DROWS = Port("grad_rows", role="gate")  # where the name is a gate's by group
DW = Port("grad_weight", "+[h] n", "weight")
DB = Port("grad_bias", "+[h] n", "bias")
DSCALE = Port("grad_scale", "+g n", "mod_scale")
DSHIFT = Port("grad_shift", "+g n", "mod_shift")
DMOD_GATE = Port("grad_gate", "+g n", "mod_gate")
DHEAD_W = Port("grad_weight", "+n", "weight")
DKEY = Port("grad_key", role="key", of="key")
DKEY_W = Port("grad_key_weight", "+n", "key_weight", of="key")
Y_AGAIN = replace(Y, like="")

_BACKWARD = (
    Op(
        "norm_backward",
        "",
        (DY, DSUM, X, GATE_IF, *AFFINE, *STATISTICS),
        (DX, DRESIDUAL, DGATE, DW, DB, Y_AGAIN),
        (
            *(*SPEC, "eps", "added", "output_mask", "backend"),
            *("grad_output_2", "grad_output_3", "grad_output_4"),
            *("output", "dropout_mask", "layer_scale", "input_dtype"),
        ),
        takes_late=(*TERMS, *BRANCH_PORTS),
    ),
    Op(
        "modulated_norm_backward",
        "",
        (DY, DSUM, X, INPUT, *AFFINE, *STATISTICS, MOD_SCALE, MOD_GATE),
        (DX, DRESIDUAL, DROWS, DW, DB, DSCALE, DSHIFT, DMOD_GATE),
        ("hidden", "norm", "shift", "eps", "added", "output_mask", "backend"),
    ),
    Op(
        "rms_norm_rope_backward",
        "",
        (
            *(DTURNED, DKEY_TURNED, X, HEAD_WEIGHT, KEY, KEY_WEIGHT, SAVED_RSTD, SAVED_KEY_RSTD),
            *(COS, SIN, POSITIONS),
        ),
        (DX, DHEAD_W, DKEY, DKEY_W),
        ("hidden", *ROTATION, "offset", "eps", "output_mask", "backend"),
    ),
)
BACKWARD = {op.name: op for op in _BACKWARD}

# What other modules read of the rows.
# The roles of what lies by group, and of a key and its weight, in the order of Needs.gradients.
MODULATION = MOD_SCALE.role, MOD_SHIFT.role, MOD_GATE.role
OF_KEY = KEY.role, KEY_WEIGHT.role
# The ops of one norm: of rows alone, with tensors by group, those whose output is rotated, and
# those whose output is quantised.
MODULATED_NORMS = tuple(op.name for op in _ROWS if MOD_SCALE in op.takes)
ROTATED_NORMS = tuple(op.name for op in _ROWS if op.rotated)
NOT_OF_ROWS = MODULATED_NORMS + ROTATED_NORMS
NORMS = tuple(op.name for op in _ROWS if op.of_rows and not op.calls)
QUANTIZED_NORMS = tuple(op.name for op in _ROWS if op.quantized)
