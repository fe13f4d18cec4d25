"""The forward and the backward pass of every variant, and of any number of rows."""

import pytest

from tests import cases
from tests.executors import Inputs
from tests.ops.helpers import slow
from tilenorm.spec import NormSpec

from .helpers import check, each_spec, every_result

NARROW = cases.every_variant(24)[::2] + cases.every_variant(37)[1::2]
MORE = cases.every_variant(24)[1::2] + cases.every_variant(37)[::2]  # the others of each size
# On sm_80 blocks share these rows. Some variants of each dtype are enough.
SHARED = cases.every_variant(4104)[::8] + cases.every_variant(4107)[4::8]


@pytest.mark.parametrize(
    "executor, spec",
    [("interpreter_sm_90", spec) for spec in NARROW]
    + slow(*(("interpreter_sm_90", spec) for spec in MORE))
    + [("gpu", spec) for spec in (*NARROW, *MORE)]
    + [(executor, spec) for executor in ("interpreter_sm_80", "gpu") for spec in SHARED],
    indirect=["executor"],
    ids=cases.label,
)
def test_every_variant(executor, spec):
    inputs = Inputs.random(spec, 2 if spec.hidden > cases.NARROW else 5, executor.device)
    check(spec, inputs, every_result(executor, spec, inputs))


@pytest.mark.parametrize("rows", [1, 2, 13, 131, 1031])
@each_spec(argvalues=[NormSpec("rms", n, "float16", "float16", "float16") for n in (16, 37, 520)])
def test_any_number_of_rows(executor, spec, rows):
    inputs = Inputs.random(spec, rows, executor.device)
    check(spec, inputs, every_result(executor, spec, inputs))
