"""Lists what tilenorm finds on this machine: versions, GPUs, compiler, cache, and problems."""

import platform
import subprocess
from importlib import metadata

import torch

from ..launch import user_table
from ..launch.calls import every_gradient
from ..launch.kernel import CompileError
from ..launch.plan import plan_backward, plan_forward
from ..launch.target import MULTIPROCESSORS, Target
from ..launch.toolchain import cache_folder, cache_problem, compiler_path, driver_version
from ..ops.registry import device_of, refusals
from ..ops.torch_private import rms_norm_of_torch
from ..spec import OPS, NormSpec
from .precompile import calls_of, compile_call

ROWS = 4096
PACKAGES = ("tilenorm", "torch", "cuda-tile", "nvidia-cuda-tileiras", "triton")


def information() -> tuple[list[str], list[str]]:
    """(lines to print, problems). The lines name the problems too."""
    wrong = []
    lines = [f"python {platform.python_version()}"]
    lines += [f"{name} {_version(name)}" for name in PACKAGES]
    lines.append(f"RMSNorm of torch on CUDA: {rms_norm_of_torch()}")
    lines.append(f"compiler {_compiler(wrong)}")
    lines.append(f"compile cache {_cache(wrong)}")
    lines += _tables(wrong)
    devices = [("cuda", i) for i in range(torch.cuda.device_count())]
    if devices:
        driver = driver_version()
        lines.append(f"driver serves CUDA {driver // 1000}.{driver % 1000 // 10}")
    else:
        lines.append("no NVIDIA GPU or no driver: the reference implementation serves every op")
    for kind, index in devices or [("cpu", None)]:
        device = device_of(kind, index)
        name = torch.cuda.get_device_name(index) if kind == "cuda" else "cpu"
        arch = f", {device.target.arch}" if device.target else ""
        multiprocessors = f", {device.target.multiprocessors} SMs" if device.target else ""
        lines.append(f"{kind}{'' if index is None else f':{index}'} {name}{arch}{multiprocessors}")
        for op in OPS:
            spec = NormSpec.of(op, 4096, "bfloat16", weight="bfloat16")
            reasons = refusals(spec, ROWS, device)
            if reasons["cutile"] is None:
                reasons["cutile"] = _not_compiled(spec, device.target)
            chosen = next(name for name, reason in reasons.items() if reason is None)
            lines.append(f"  {op}: {chosen}")
            for other, reason in reasons.items():
                if reason is not None:
                    lines.append(f"    {other} refuses: {reason}")
                    if kind == "cuda":
                        wrong.append(reason)
    lines += [f"wrong: {reason}" for reason in dict.fromkeys(wrong)]
    return lines, wrong


def _not_compiled(spec: NormSpec, target: Target) -> str | None:
    """Why the kernels of a training step do not compile, or None. They go into cuTile's cache."""
    plans = plan_forward(spec, target, True), plan_backward(spec, target, every_gradient(spec))
    try:
        for plan in plans:
            for call in calls_of(plan, ROWS):
                compile_call(call, target.arch)
    except CompileError as error:
        return str(error)
    return None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _compiler(wrong: list[str]) -> str:
    try:
        path = compiler_path()
        command = [path, "--version"]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        wrong.append(f"tileiras does not run: {error}")
        return "missing"
    return f"{path}: {text.stdout.strip().splitlines()[-1]}"


def _tables(wrong: list[str]) -> list[str]:
    """Lines about the user's own tables. An invalid table is added to `wrong`."""
    lines = []
    for arch in MULTIPROCESSORS:
        try:
            path = user_table.path_of(arch)
            lines.append(f"user table {path}: {len(user_table.read(path, arch))} configurations")
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            wrong.append(f"the user table {path} is ignored: {error}")
    return lines


def _cache(wrong: list[str]) -> str:
    if problem := cache_problem():
        wrong.append(f"{problem}: every process compiles anew")
    return cache_folder() or "off"
