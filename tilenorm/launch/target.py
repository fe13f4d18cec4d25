"""The GPU that a plan is made for, as far as planning has to know it."""

from dataclasses import dataclass

# Architectures that cuTile compiles for, with the number of multiprocessors of a typical GPU. Only
# grids depend on the number. A plan for the GPU of this machine takes the number from the device.
MULTIPROCESSORS = {
    "sm_80": 108,
    "sm_86": 84,
    "sm_89": 142,
    "sm_90": 132,
    "sm_100": 148,
    "sm_103": 148,
    "sm_110": 20,
    "sm_120": 170,
    "sm_121": 48,
}
# GPUs with a table of their own in tuned/, as their driver names them.
MACHINES = {"NVIDIA H100 80GB HBM3": "H100"}
# (architecture, machine), by the name of their table.
TARGETS = {arch: (arch, "") for arch in MULTIPROCESSORS} | {"sm_90_H100": ("sm_90", "H100")}
REGISTERS = 65536  # of a multiprocessor, on all of them
# KiB of shared memory of a multiprocessor. Architectures that are not listed have 228 KiB.
SHARED_KIB = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_120": 100, "sm_121": 100}


@dataclass(frozen=True)
class Target:
    """A GPU, as far as a plan depends on it."""

    arch: str  # such as "sm_90"
    multiprocessors: int
    machine: str = ""  # a value of MACHINES; "" for all other GPUs

    @classmethod
    def of(cls, name: str) -> "Target":
        """To plan without the GPU. Raises ValueError for a name that is not in TARGETS."""
        if name not in TARGETS:
            raise ValueError(f"arch: got {name!r}, takes one of {', '.join(TARGETS)}")
        arch, machine = TARGETS[name]
        return cls(arch, MULTIPROCESSORS[arch], machine)

    @property
    def name(self) -> str:
        """A name in TARGETS."""
        return f"{self.arch}_{self.machine}" if self.machine else self.arch

    @property
    def has_tma(self) -> bool:
        """Whether the compiler can turn tile loads into TMA copies and prefetch with them."""
        return int(self.arch.removeprefix("sm_")) >= 90

    @property
    def has_fp8(self) -> bool:
        """Whether cuTile has 8-bit floats."""
        return self.has_tma

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel can start before the previous one has ended, and wait for it later."""
        return self.has_tma

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a block may use: that of a multiprocessor, less 1 KiB reserved."""
        return (SHARED_KIB.get(self.arch, 228) - 1) * 1024
