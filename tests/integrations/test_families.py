"""The table of families, .github/families.md: it is what its command prints."""

import subprocess
import sys

import pytest
import torch

from . import families

pytest.importorskip("diffusers")
# One of each section, and one of each library.
SOME = ["llama", "t5", "convnext", "dac", "FluxTransformer2DModel", "AutoencoderKL"]


@pytest.mark.parametrize("name", SOME)
def test_table_has_the_norms_of(name):
    with torch.device("meta"):
        model = families.families()[name]()
    norms = families.norms_of(model)
    section = families.FILE.read_text().partition(f"\n## {families.title(norms)}: ")[2]
    section = section.partition("\n## ")[0]
    if norms:
        assert families.row(name, norms) in section.splitlines()
    else:
        assert name in section.replace(",", " ").split()


@pytest.mark.slow
def test_file_is_what_the_command_prints():
    text = families.FILE.read_text()
    if families.versions() not in text:
        pytest.skip(f"the file was not made with {families.versions()}")
    command = [sys.executable, "-m", "tests.integrations.families"]
    run = subprocess.run(command, cwd=families.FILE.parents[1], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == text
