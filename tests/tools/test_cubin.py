"""Resources read from a cubin: as cuobjdump tells them."""

import re
import shutil
import subprocess

import pytest

from tilenorm.launch.config import Backward, Hints
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec
from tilenorm.tools import cubin
from tilenorm.tools.candidates import Search
from tilenorm.tools.precompile import calls_of, cubin_of
from tilenorm.tools.tune import plan_of

# Without spills and with, by tile loads, and another version of the ELF format.
COMPILED = {
    "sm_90 with spills": ("sm_90", Backward((1024,), 4, hints=Hints(5))),
    "sm_90 by tile loads": ("sm_90", Backward((1024,), tma=True, hints=Hints(1, 8))),
    "sm_100": ("sm_100", Backward((512,), hints=Hints(3))),
}


@pytest.fixture(scope="module", params=COMPILED)
def cubins(request) -> list[bytes]:
    arch, config = COMPILED[request.param]
    spec = NormSpec("rms", 1024, "bfloat16", "bfloat16")
    search = Search(spec, Target.of(arch), "backward")
    calls = calls_of(plan_of(search, config), 65536)
    return [cubin_of(call, arch) for call in calls]


def cuobjdump() -> str | None:
    """Where it is: from the package nvidia-cuda-cuobjdump, or on PATH."""
    try:
        from nvidia import cu13
    except ImportError:
        return shutil.which("cuobjdump")
    return shutil.which("cuobjdump", path=f"{cu13.__path__[0]}/bin") or shutil.which("cuobjdump")


def test_as_cuobjdump_tells(cubins, tmp_path):
    tool = cuobjdump()
    assert tool, 'pip install -e ".[test]" brings it'
    for code in cubins:
        path = tmp_path / "kernel.cubin"
        path.write_bytes(code)
        command = [tool, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        told = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
        found = cubin.resources(code)
        assert (found.registers, found.spill_bytes, found.shared_bytes) == tuple(
            int(number) for number in told.groups()
        )
        assert found.threads % 32 == 0


@pytest.mark.parametrize("cubins", ["sm_90 with spills"], indirect=True)
def test_spills_are_seen(cubins):
    """What the test above compares is not zero throughout."""
    assert cubin.resources(cubins[0]).spill_bytes > 0


@pytest.mark.parametrize("cubins", ["sm_90 with spills"], indirect=True)
@pytest.mark.parametrize("cut", [0, 3, 70, 1000])
def test_what_is_no_cubin_is_refused(cubins, cut):
    with pytest.raises(ValueError, match="not a cubin with one kernel"):
        cubin.resources(cubins[0][:cut])
