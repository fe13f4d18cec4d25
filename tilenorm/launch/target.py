"""The GPU that a plan is for, described by what planning needs to know of it."""

from dataclasses import dataclass

# Architectures that cuTile compiles for, with the multiprocessors of a typical part. Only grids
# depend on the number; a plan for a GPU at hand takes it from the device.
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
# KiB of a multiprocessor where they are not those of the data centre's GPUs since Hopper.
SHARED_KIB = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_120": 100, "sm_121": 100}


@dataclass(frozen=True)
class Target:
    """arch: "sm_90". multiprocessors: how many blocks run side by side at one block each."""

    arch: str
    multiprocessors: int

    @classmethod
    def of(cls, arch: str) -> "Target":
        """The target of an architecture's name, for planning without its GPU.

        Raises ValueError for an architecture that cuTile does not compile for.
        """
        if arch not in MULTIPROCESSORS:
            known = ", ".join(MULTIPROCESSORS)
            raise ValueError(f"arch: got {arch!r}, takes one of {known}")
        return cls(arch, MULTIPROCESSORS[arch])

    @property
    def has_tma(self) -> bool:
        """Tile loads can use the bulk tensor copy engine, whose reads the compiler runs ahead."""
        return int(self.arch.removeprefix("sm_")) >= 90

    @property
    def has_dependent_launch(self) -> bool:
        """A kernel can start before the one ahead of it has ended, and wait for it in its midst."""
        return self.has_tma

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a block may take: what a multiprocessor has less 1 KiB of its own."""
        return (SHARED_KIB.get(self.arch, 228) - 1) * 1024
