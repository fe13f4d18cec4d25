"""Lists what tilenorm finds on this machine: versions, GPUs, compiler, cache, and problems."""

import platform
import subprocess
from importlib import metadata

import torch

from ..launch import user_table
from ..launch.target import MULTIPROCESSORS
from ..launch.toolchain import cache_folder, compiler_path, driver_version
from ..ops.registry import device_of, refusals
from ..spec import OPS, NormSpec

PACKAGES = ("tilenorm", "torch", "cuda-tile", "nvidia-cuda-tileiras", "triton")


def information() -> tuple[list[str], list[str]]:
    """(lines to print, problems). The lines name the problems too."""
    wrong = []
    lines = [f"python {platform.python_version()}"]
    lines += [f"{name} {_version(name)}" for name in PACKAGES]
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
            reasons = refusals(spec, 4096, device)
            chosen = next(name for name, reason in reasons.items() if reason is None)
            lines.append(f"  {op}: {chosen}")
            for other, reason in reasons.items():
                if reason is not None:
                    lines.append(f"    {other} refuses: {reason}")
                    if kind == "cuda":
                        wrong.append(reason)
    lines += [f"wrong: {reason}" for reason in dict.fromkeys(wrong)]
    return lines, wrong


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _compiler(wrong: list[str]) -> str:
    try:
        path = compiler_path()
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        wrong.append(f"tileiras does not run: {error}")
        return "missing"
    return f"{path}: {text.stdout.strip().splitlines()[-1]}"


def _tables(wrong: list[str]) -> list[str]:
    """Lines about the user's own tables. An invalid table is added to `wrong`."""
    lines = []
    for arch in MULTIPROCESSORS:
        path = user_table.path_of(arch)
        try:
            lines.append(f"user table {path}: {len(user_table.read(path, arch))} configurations")
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            wrong.append(f"the user table {path} is ignored: {error}")
    return lines


def _cache(wrong: list[str]) -> str:
    folder = cache_folder()
    if folder is None:
        wrong.append("cuTile's cache is off (CUDA_TILE_CACHE_DIR): every process compiles anew")
        return "off"
    return folder
