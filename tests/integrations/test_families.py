"""The index of families, .github/families.md: it says what its command prints."""

import pytest

from . import families

pytest.importorskip("diffusers")
pytestmark = pytest.mark.any_torch
# One of each section, and one of each library.
SOME = ["llama", "t5", "convnext", "dac", "FluxTransformer2DModel", "AutoencoderKL"]
EACH = 24  # The command takes minutes for all families: the slow run looks at one of so many.


def check(*names: str) -> None:
    index = families.read(families.FILE.read_text())
    for name, norms in families.results_of([*names]).items():
        assert index[name] == families.places(norms), name


@pytest.mark.parametrize("name", SOME)
def test_index_has_the_norms_of(name):
    check(name)


@pytest.mark.slow
def test_index_is_short_and_complete_and_has_the_norms_of_many():
    text, every = families.FILE.read_text(), families.families()
    assert {*families.read(text)} == {*every}
    assert len(text) < 24_000
    if families.versions() in text:
        check(*every[::EACH])


def test_index_is_read_as_it_was_written():
    """What is asserted of a family is the whole of what the file says of it."""
    left = "`B` is left: it has submodules"
    results = {
        "one": ["`A`: rms_norm eps=None", "`C`: layer_norm"],
        "two": ["`A`: rms_norm", left, "`D` is left: its outputs match no norm of tilenorm"],
        "three": [left],
        "four": [],
        "five": None,
    }
    assert families.read(families.index(results)) == {
        name: families.places(norms) for name, norms in results.items()
    }
