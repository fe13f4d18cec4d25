"""Where, when and with what a run is made."""

import os
import platform
import re
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("triton", "cuda-tile", "quack-kernels", "liger-kernel", "tilegym")


def device() -> str:
    """The GPU if there is one, else the CPU.

    On a GPU, a shape that tilenorm's kernels do not serve is from now on refused, in this process
    and those it starts: timing the reference in its place would be no measurement of tilenorm.
    """
    if not torch.cuda.is_available():
        return "cpu"
    os.environ.setdefault("TILENORM_BACKEND", "cutile")
    return "cuda"


def describe_run(device: str, arguments: list[str], absent: dict[str, str]) -> dict:
    """The line of a record that says so."""
    import tilenorm

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m bench", *arguments]),
        "device": device,
        **(_gpu(device) if device != "cpu" else {"machine": platform.machine()}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tileiras": _tileiras(),
        "packages": {name: _version(name) for name in PACKAGES},
        "tilenorm": tilenorm.__version__,
        "commit": _commit(),
        "absent": absent,
    }


def _gpu(device: str) -> dict:
    properties = torch.cuda.get_device_properties(device)
    return {
        "machine": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        module = sys.modules.get(package.removesuffix("-kernels"))  # importable, not installed
        return getattr(module, "__version__", None)


def _tileiras() -> str | None:
    on_path = shutil.which("tileiras")
    found = re.search(r"V(\d+(?:\.\d+)+)", _output(on_path, "--version") or "") if on_path else None
    return found[1] if found else _version("nvidia-cuda-tileiras")


def _commit() -> str | None:
    """The commit of this checkout, with +dirty if it has been edited."""
    git = ("git", "-C", str(Path(__file__).resolve().parents[1]))
    commit = _output(*git, "rev-parse", "--short=12", "HEAD", lines=1)
    edited = commit and _output(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+dirty" if edited else commit


def _output(*command: str, lines: int | None = None) -> str | None:
    """What a program prints, or None where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return "\n".join(done.stdout.strip().splitlines()[:lines])
