"""Reads the resources of a compiled kernel from its ELF file.

A `.nv.info` section is a list of attributes: (format, attribute, size or value, bytes). A test
compares the results with NVIDIA's cuobjdump.
"""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

# Attributes of .nv.info. Format _SIZED: bytes follow. The first two hold (kernel's symbol, number).
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F
_THREADS = 0x10  # the block's shape
_SIZED = 4


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel.

    registers, spill_bytes: for each thread. shared_bytes, threads: for each block. code: a digest
    of the machine code.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    code: str


def resources(cubin: bytes) -> Resources:
    """The resources of the kernel of a cubin. Raises ValueError unless there is exactly one."""
    values, shared, code = {}, 0, hashlib.sha256()
    try:
        for name, size, data in sections(cubin):
            if name.startswith(".nv.info"):
                values |= dict(attributes(data))
            elif name.startswith(".nv.shared.") and name != ".nv.shared.reserved.0":
                shared += size
            elif name.startswith(".text."):
                code.update(data)
        shape = struct.unpack("<III", values[_THREADS])
        registers, frame = (
            struct.unpack("<II", values[key])[1] for key in (_REGISTERS, _FRAME_SIZE)
        )
    except (struct.error, LookupError, ValueError) as error:
        raise ValueError(f"not a cubin with one kernel: {error!r}") from error
    threads = shape[0] * shape[1] * shape[2]
    return Resources(registers, frame, shared, threads, code.hexdigest())


def sections(elf: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Name, size and bytes of each section of a 64-bit little-endian ELF file."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    step, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    # A header has the section's name (as an offset), offset and size.
    headers = [struct.unpack_from("<I20xQQ", elf, table + i * step) for i in range(count)]
    names = headers[names_at][1]
    for name, offset, size in headers:
        start = names + name
        yield elf[start : elf.index(b"\0", start)].decode(), size, elf[offset : offset + size]


def attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Each attribute that bytes follow, and the bytes."""
    at = 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind == _SIZED:
            yield attribute, info[at : at + size]
            at += size
