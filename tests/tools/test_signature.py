"""What the compiler assumes of arguments, without a GPU, is what cuTile itself assumes of them."""

from tests import stand_in_driver

# Drawn arrays, the arguments of kernels, and a kernel with every other kind of argument.
PROGRAM = """
from random import Random
import cuda.tile as ct
import torch
from cuda.tile.compilation import CallingConvention, KernelSignature
from tests.executors import backward_calls, forward_calls
from tests.launch.test_driver import SPECS
from tests.stand_in_driver import arrays_of, in_float16
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.target import Target
from tilenorm.tools.signature import signature

@ct.kernel
def kernel(X, n: int, eps: float, N: ct.Constant[int], WIDTHS: ct.Constant[tuple[int, ...]]):
    pass

def compare(kernel, arguments):
    convention = CallingConvention.cutile_python_v2()
    expected = KernelSignature.from_kernel_args(kernel, arrays_of(arguments), convention)
    found = signature(kernel, arguments)
    assert found.parameters == expected.parameters, arguments
    return found.symbol

rng, symbols = Random(0), set()
for _ in range(300):
    dtype = rng.choice((torch.float16, torch.float32, torch.int32, torch.uint8))
    shape = rng.choice((1, 5, 16)), rng.choice((1, 9, 16, 48))
    # Rows that are contiguous, apart, in whole vectors or not, and that share elements; columns.
    strides = rng.choice(((shape[1], 1), (64, 1), (60, 1), (50, 1), (8, 1), (1, 16), (1, 5)))
    start = rng.choice((0, 0, 1, 4))
    x = torch.empty(1000 + start, dtype=dtype, device="meta").as_strided(shape, strides, start)
    symbols.add(compare(kernel, (x, 5, 1e-6, 9, (8, 1))))
assert len(symbols) > 50
target = Target.of("sm_90")
for spec in SPECS.values():
    if not spec.quantized:  # NumPy's interface has no string for 8-bit floats
        spec = in_float16(spec)
        for rows in (4, 16):
            calls = forward_calls(spec, target, rows, True)
            for call in calls + backward_calls(spec, target, rows, every_gradient(spec)):
                compare(call.kernel, call.arguments)
"""


def test_agrees_with_cutile(tmp_path):
    stand_in_driver.built(tmp_path)
    done = stand_in_driver.run(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
