"""The run line of a record: where, when and with which versions the run was made."""

import hashlib
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

PACKAGES = ("triton", "cuda-tile", "quack-kernels", "liger-kernel", "tilegym", "flashinfer-python")


def device() -> str:
    """The device of a run: "cuda" if there is a GPU, else "cpu".

    On a GPU this sets TILENORM_BACKEND=cutile for this process and the processes that it starts:
    tilenorm then refuses a shape that its kernels do not serve. Otherwise the bench would time the
    reference implementation in place of the kernels.
    """
    if not torch.cuda.is_available():
        return "cpu"
    os.environ.setdefault("TILENORM_BACKEND", "cutile")
    return "cuda"


def describe_run(device: str, arguments: list[str], absent: dict[str, str]) -> dict:
    """The run line of a record. In the command, the file of ``--out`` stands without its folder."""
    import tilenorm
    from tilenorm.ops.torch_private import rms_norm_of_torch

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m bench", *_without_folder(arguments)]),
        "device": device,
        **(
            _gpu(device)
            if device != "cpu"
            else {"machine": f"{os.cpu_count()} × {platform.machine()}"}
        ),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rms_norm": rms_norm_of_torch(),
        "cuda": torch.version.cuda,
        "tileiras": _tileiras(),
        "packages": {name: _version(name) for name in PACKAGES},
        "tilenorm": tilenorm.__version__,
        "commit": _commit(),
        "sources": _sources(),
        "absent": absent,
    }


def _without_folder(arguments: list[str]) -> list[str]:
    pairs = zip(["", *arguments], arguments, strict=False)
    return [Path(value).name if option == "--out" else value for option, value in pairs]


def _gpu(device: str) -> dict:
    properties = torch.cuda.get_device_properties(device)
    return {
        "machine": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "driver": _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", lines=1
        ),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        module = sys.modules.get(package.removesuffix("-kernels"))  # imported, but not installed
        return getattr(module, "__version__", None)


def _tileiras() -> str | None:
    on_path = shutil.which("tileiras")
    found = re.search(r"V(\d+(?:\.\d+)+)", _output(on_path, "--version") or "") if on_path else None
    return found[1] if found else _version("nvidia-cuda-tileiras")


def _commit() -> str | None:
    """The commit of this checkout, followed by +dirty if tracked files were edited since."""
    git = ("git", "-C", str(Path(__file__).resolve().parents[1]))
    commit = _output(*git, "rev-parse", "--short=12", "HEAD", lines=1)
    edited = commit and _output(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+dirty" if edited else commit


def _sources() -> str:
    """A digest of tilenorm's files: two edited checkouts of one commit differ in it."""
    found, folder = hashlib.sha256(), Path(__file__).resolve().parents[1] / "tilenorm"
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".json")):
        found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _output(*command: str, lines: int | None = None) -> str | None:
    """The output of a program, or None if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return "\n".join(done.stdout.strip().splitlines()[:lines])
