"""Lists what tilenorm finds on this machine: versions, GPUs, compiler, cache, and problems."""

import platform
from collections.abc import Iterator

import torch

from ..launch import user_table
from ..launch.calls import every_gradient
from ..launch.target import MULTIPROCESSORS
from ..launch.toolchain import (
    COMPILER_PACKAGES,
    CompileError,
    cache_folder,
    cache_problem,
    compiler_path,
    compiler_problem,
    compiler_version,
    cuda_tile_missing,
    driver_version,
    package_version,
)
from ..ops.passes import native
from ..ops.passes.registry import Device, device_of, record_failure, refusals
from ..ops.pytorch.torch_private import rms_norm_of_torch
from ..spec import NormSpec
from ..table import NORMS, NOT_OF_ROWS, ROTATED_NORMS
from .fingerprint import fingerprint, other_compiler

ROWS, HIDDEN, HEAD = 4096, 4096, 128  # of calls that are tried
PACKAGES = ("tilenorm", "torch", "cuda-tile", *COMPILER_PACKAGES, "triton")


def information() -> tuple[list[str], list[str]]:
    """(lines to print, problems). The lines name the problems too."""
    wrong: list[str] = []
    lines = [f"python {platform.python_version()}"]
    lines += [f"{name} {package_version(name)}" for name in PACKAGES]
    lines.append(f"RMSNorm of torch on CUDA: {rms_norm_of_torch()}")
    lines.append(f"repeated calls: {native.state().told()}")
    if not cuda_tile_missing():
        lines += [*_toolchain(wrong), *_tables(wrong)]
    devices: list[tuple] = [("cuda", i) for i in range(torch.cuda.device_count())]
    if devices:
        driver = driver_version()
        lines.append(f"driver serves CUDA {driver // 1000}.{driver % 1000 // 10}")
    else:
        lines.append("no NVIDIA GPU or no driver: the reference implementation serves every op")
    for kind, index in devices or [("cpu", None)]:
        lines += _device(kind, index, wrong)
    wrong = list(dict.fromkeys(wrong))  # ops that launch the same kernels have the same reasons
    lines += [f"wrong: {reason}" for reason in wrong]
    return lines, wrong


def _device(kind: str, index: int | None, wrong: list[str]) -> Iterator[str]:
    """Lines about a device: what serves each op there, and why others do not."""
    device = device_of(kind, index)
    name = f"cuda:{index} {torch.cuda.get_device_name(index)}" if kind == "cuda" else "cpu cpu"
    target = device.target
    yield name + (f", {target.name}, {target.multiprocessors} SMs" if target else "")
    yield f"  fingerprint {fingerprint(torch.device(kind, index))}"
    if target and (note := other_compiler(target)):
        yield f"  warning: {note}"
    before = None
    for op in NORMS + NOT_OF_ROWS:
        hidden = HEAD if op in ROTATED_NORMS else HIDDEN
        spec = NormSpec.of(op, hidden, "bfloat16", weight="bfloat16")
        reasons = refusals(spec, ROWS, device)
        if reasons["cutile"] is None:
            reasons["cutile"] = _not_compiled(spec, device)
        yield f"  {op}: {next(name for name, reason in reasons.items() if reason is None)}"
        refused = {other: reason for other, reason in reasons.items() if reason is not None}
        if refused != before:  # the reasons of an op are those of the one above it
            yield from (f"    {other} refuses: {reason}" for other, reason in refused.items())
        before = refused
        wrong += refused.values() if kind == "cuda" else ()


def _not_compiled(spec: NormSpec, device: Device) -> str | None:
    """Why the kernels of a training step do not compile, or None. They go into cuTile's cache."""
    from ..launch.plan import plan_backward, plan_forward  # import cuda.tile, which is there
    from .precompile import calls_of, compile_call

    target, every = device.target, every_gradient(spec)
    try:
        for plan in (plan_forward(spec, target, True), plan_backward(spec, target, every)):
            for call in calls_of(plan, ROWS):
                compile_call(call, target.arch)
    except CompileError as error:
        record_failure("cutile", spec, device, error)
        return str(error)
    return None


def _toolchain(wrong: list[str]) -> Iterator[str]:
    if problem := compiler_problem():
        wrong.append(problem)
    try:
        yield f"compiler {compiler_path()}: tileiras {compiler_version()}"
    except FileNotFoundError:
        yield "compiler missing"
    if problem := cache_problem():
        wrong.append(f"{problem}: every process compiles anew")
    yield f"compile cache {cache_folder() or 'off'}"


def _tables(wrong: list[str]) -> Iterator[str]:
    for arch in MULTIPROCESSORS:
        try:
            path = user_table.path_of(arch)
            yield f"user table {path}: {len(user_table.read(path, arch))} configurations"
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            wrong.append(f"the user table {path} is ignored: {error}")
