"""The aten override for the CPU's dispatch key: the interpreter runs the kernels, without a GPU."""

from contextlib import contextmanager

import pytest
import torch

from tests.support.executors import Interpreter
from tilenorm.integrations import aten
from tilenorm.launch.target import Target
from tilenorm.ops.passes.bound import BoundNorm
from tilenorm.ops.passes.registry import Device, cutile_implementation

GPU = Device("cuda", Target("sm_90", 2), 13000)


class CpuOverride(aten.Override):
    """An override for the CPU's dispatch key. launches: the names of the kernels that ran."""

    def __init__(self):
        self.launches, self._interpreter = [], Interpreter("sm_90").run()
        super().__init__("CPU", aten.Kernels(self.runner))

    def runner(self, spec, index) -> BoundNorm | None:
        kernels = cutile_implementation(self.run)
        return None if kernels.refuses(spec, 0, GPU) else BoundNorm(kernels, spec, GPU)

    def run(self, launches, arrays, index) -> None:
        self.launches.extend(launch.kernel._pyfunc.__name__ for launch in launches)
        self._interpreter(launches, arrays, index)

    def around(self, function, *arguments):
        """Call a function inside an override block, and return its result."""
        self.ask(blocks=1)
        try:
            return function(*arguments)
        finally:
            self.ask(blocks=-1)


@contextmanager
def cpu_override():
    """An override for the CPU that is not active. Checks that the block restored the operators."""
    # PyTorch has no CPU kernel for this operator, only a decomposition. Register that one.
    library = torch.library.Library("aten", "IMPL")
    decomposed = torch._decomp.decomposition_table[torch.ops.aten._fused_rms_norm_backward.default]
    library.impl("_fused_rms_norm_backward", decomposed, "CPU")
    before = registered()
    override = CpuOverride()
    yield override
    override.ask(enabled=False)
    assert registered() == before
    library._destroy()


@pytest.fixture
def cpu():
    with cpu_override() as override:
        yield override


def registered() -> list[str]:
    """A dump of every kernel that is registered for the operators that the override replaces."""
    return [torch._C._dispatch_dump(f"aten::{name}") for name in aten.OPERATORS]
