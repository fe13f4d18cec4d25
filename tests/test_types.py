"""The type checker of ./format.sh --check finds what no run without a GPU would."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_checker_finds_a_function_that_was_renamed(tmp_path):
    """Quantised norms once called it by its former name, under CUDA's autocast alone."""
    pytest.importorskip("mypy")
    shutil.copytree(ROOT / "tilenorm", tmp_path / "tilenorm")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file = tmp_path / "tilenorm" / "ops" / "quantized" / "norm.py"
    text = file.read_text()
    assert text.count("library.autocast_tensors(") == 1
    file.write_text(text.replace("library.autocast_tensors(", "library.autocast_input("))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "-p", "tilenorm"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    (error, _) = done.stdout.splitlines()
    assert 'Module has no attribute "autocast_input"' in error
