"""aten's norms on the CPU by the interpreter, in place of the GPU's."""

import pytest
import torch

from tilenorm.integrations import aten
from tilenorm.launch.target import Target
from tilenorm.ops.plans import Runner
from tilenorm.ops.registry import Device, cutile_implementation

from ..executors import Interpreter

GPU = Device("cuda", Target("sm_90", 2), 13000)


class CpuOverride(aten.Override):
    """An override for the CPU's key. launches: the names of the kernels that ran."""

    def __init__(self):
        self.launches, self._interpreter = [], Interpreter("sm_90").run()
        super().__init__("CPU", aten.Kernels(self.runner))

    def runner(self, spec, index) -> Runner | None:
        kernels = cutile_implementation(self.run)
        return None if kernels.refuses(spec, 0, GPU) else Runner(kernels, spec, GPU)

    def run(self, launches, arrays, index) -> None:
        self.launches.extend(launch.kernel._pyfunc.__name__ for launch in launches)
        self._interpreter(launches, arrays, index)

    def around(self, function, *arguments):
        """What the function returns, in a block."""
        self.begin()
        try:
            return function(*arguments)
        finally:
            self.end()


@pytest.fixture
def cpu():
    # PyTorch has no CPU kernel of this operator, but a decomposition.
    former = torch.library.Library("aten", "IMPL")
    decomposed = torch._decomp.decomposition_table[torch.ops.aten._fused_rms_norm_backward.default]
    former.impl("_fused_rms_norm_backward", decomposed, "CPU")
    before = registered()
    override = CpuOverride()
    yield override
    override.enable(False)
    assert registered() == before
    former._destroy()


def registered() -> list[str]:
    """Every kernel of the operators that are overridden."""
    return [torch._C._dispatch_dump(f"aten::{name}") for name in aten.OPERATORS]
