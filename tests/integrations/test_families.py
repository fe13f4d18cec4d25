"""The table of families, .github/families.md: its rows are what its command prints."""

import pytest

from . import families

pytest.importorskip("diffusers")
pytestmark = pytest.mark.any_torch
# One of each section, and one of each library.
SOME = ["llama", "t5", "convnext", "dac", "FluxTransformer2DModel", "AutoencoderKL"]
EACH = 24  # The command takes minutes for all families: the slow run looks at one of so many.


def check(name: str) -> None:
    text = families.FILE.read_text()
    try:
        model = families.built(name)
    except Exception:  # as families.document does
        assert name in text.partition("\n## Not built: ")[2].replace(",", " ").split()
        return
    norms = families.norms_of(model)
    section = text.partition(f"\n## {families.title(norms)}: ")[2].partition("\n## ")[0]
    if norms:
        assert families.row(name, norms) in section.splitlines()
    else:
        assert name in section.replace(",", " ").split()


@pytest.mark.parametrize("name", SOME)
def test_table_has_the_norms_of(name):
    check(name)


@pytest.mark.slow
def test_table_has_the_norms_of_many():
    if families.versions() not in families.FILE.read_text():
        pytest.skip(f"the file was not made with {families.versions()}")
    for name in families.families()[::EACH]:
        check(name)
