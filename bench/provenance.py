"""The run line of a record: where, when and with which versions the run was made."""

import hashlib
import io
import os
import platform
import subprocess
import sys
import tokenize
from datetime import datetime, timezone
from importlib import import_module, metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ("kernels", "launch")  # the folders of tilenorm that the time of a kernel depends on
PACKAGES = ("triton", "cuda-tile", "quack-kernels", "liger-kernel", "tilegym", "flashinfer-python")


def device() -> str:
    """The device of a run: "cuda" if there is a GPU, else "cpu".

    On a GPU this sets TILENORM_BACKEND=cutile for this process and the processes that it starts:
    tilenorm then refuses a shape that its kernels do not serve. Otherwise the bench would time the
    reference implementation in place of the kernels. On a CPU one thread computes: on two cores
    that other processes use too, small operations wait up to 8 ms for a second thread.
    """
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
        return "cpu"
    os.environ.setdefault("TILENORM_BACKEND", "cutile")
    return "cuda"


def describe_run(device: str, arguments: list[str], absent: dict[str, str]) -> dict:
    """The run line of a record. In the command, the file of ``--out`` stands without its folder."""
    import tilenorm
    from tilenorm.launch import toolchain
    from tilenorm.ops.pytorch.torch_private import rms_norm_of_torch

    pairs = zip(["", *arguments], arguments, strict=False)
    shown = [Path(value).name if option == "--out" else value for option, value in pairs]
    machine = {"machine": f"{os.cpu_count()} × {platform.machine()}"}
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        machine = {
            "machine": properties.name,
            "capability": f"sm_{properties.major}{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
            "driver": toolchain.driver_release(),
        }
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m bench", *shown]),
        "device": device,
        **machine,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rms_norm": rms_norm_of_torch(),
        "cuda": torch.version.cuda,
        "tileiras": None if toolchain.cuda_tile_missing() else toolchain.compiler_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "tilenorm": tilenorm.__version__,
        "commit": _commit(),
        "sources": sources("."),
        "kernels": sources(*KERNELS),
        "host_path": host_path(),
        "absent": absent,
    }


def host_path() -> str:
    """What serves tilenorm's calls on the host: its C++, as it describes itself, or Python."""
    try:
        native = import_module("tilenorm.ops.passes.native")
    except ImportError:
        return "python"
    return str(native.describe()) if hasattr(native, "describe") else "python"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        module = sys.modules.get(package.removesuffix("-kernels"))  # imported, but not installed
        return getattr(module, "__version__", None)


def _commit() -> str | None:
    """The commit of this checkout, followed by +dirty if tracked files were edited since."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, check=True)
        return done.stdout.decode().strip()

    try:
        edited = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+dirty" if edited else "")
    except (OSError, subprocess.CalledProcessError):  # an export of the files without git
        return None


def sources(*folders: str, of: str = "tilenorm") -> str:
    """A digest of the source files in folders of tilenorm, or of another folder of the checkout,
    without their comments. Two edited checkouts of one commit have different ones.
    """
    root, digest = ROOT / of, hashlib.sha256()
    paths = {path for folder in folders for path in (root / folder).rglob("*")}
    for path in sorted(p for p in paths if p.suffix in (".py", ".json", ".cpp")):
        text = path.read_text(encoding="utf-8")
        text = _without_comments(text) if path.suffix == ".py" else text
        digest.update(f"{path.relative_to(root).as_posix()}{text}".encode())
    return digest.hexdigest()[:16]


def _without_comments(text: str) -> str:
    """The code of a Python file. What was measured stands in comments, and shall not make a record
    look as if it were of other kernels. The result is the same in every version of Python.
    """
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())
