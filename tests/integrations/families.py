"""Prints which norms patch replaces in each family of models.

    python -m tests.integrations.families > .github/families.md

Every family of transformers is built with its default config, and every class of models of
diffusers with its default arguments. The weights are on the meta device, where they take neither
memory nor time. patch looks at norms on the CPU.
"""

import inspect
import re
import sys
from pathlib import Path
from textwrap import shorten

import torch
import transformers
from torch import nn

import tilenorm
from tilenorm.integrations.patch.models import Left, Patched

FILE = Path(__file__).parents[2] / ".github" / "families.md"
# Arguments of configs and models that cannot be built without them, or that add norms.
OPTIONS = {
    "autoformer": {"prediction_length": 24},
    "informer": {"prediction_length": 24},
    "time_series_transformer": {"prediction_length": 24},
    "DreamLiteTransformer2DModel": {"in_channels": 320},
    "EasyAnimateTransformer3DModel": {"in_channels": 4, "out_channels": 4, "patch_size": 2},
    "HiDreamImageTransformer2DModel": {"patch_size": 2, "caption_channels": [64, 64]},
    "HunyuanDiT2DControlNetModel": {"in_channels": 4, "patch_size": 2},
    "HunyuanDiT2DModel": {"in_channels": 4, "patch_size": 2},
    "LatteTransformer3DModel": {"in_channels": 4, "patch_size": 2, "sample_size": 32}
    | {"caption_channels": 64},
    "LuminaNextDiT2DModel": {"num_kv_heads": 8},
    "SD3Transformer2DModel": {"qk_norm": "rms_norm", "dual_attention_layers": [0]},
    "Transformer2DModel": {"in_channels": 320},
    "TransformerTemporalModel": {"in_channels": 320},
}
HEAD = """# Families of models

This file says what `tilenorm.patch` does with the norms of {count} families of models: those of
transformers, which have the lower-case name of their config, and the classes of models of
diffusers. For each class of norm it names the function of tilenorm that runs in its place, or the
reason why the norm is left. The function takes the eps of the module. A module without parameters
that contains other modules, such as AdaLayerNormZero, is not listed, but the norm in it is.

`python -m tests.integrations.families > .github/families.md` writes this file. It was last run with
{versions}."""


def versions() -> str:
    import diffusers

    return f"transformers {transformers.__version__} and diffusers {diffusers.__version__}"


def families() -> list[str]:
    """The families of transformers, by the names of their configs, and the models of diffusers."""
    import diffusers

    configs = transformers.CONFIG_MAPPING
    found = [name for name in sorted(configs) if configs[name] in transformers.MODEL_MAPPING]
    classes = {name: getattr(diffusers, name, None) for name in sorted(dir(diffusers))}
    base = diffusers.ModelMixin
    found += [n for n, c in classes.items() if inspect.isclass(c) and issubclass(c, base)]
    return [name for name in found if name != "ModelMixin"]


def built(family: str) -> nn.Module:
    """A model of a family on the meta device."""
    with torch.device("meta"):
        if family in transformers.CONFIG_MAPPING:
            config = transformers.CONFIG_MAPPING[family](**OPTIONS.get(family, {}))
            return transformers.AutoModel.from_config(config)
        import diffusers

        return getattr(diffusers, family)(**OPTIONS.get(family, {}))


def norms_of(model: nn.Module) -> list[str]:
    """A line for each class of norm and what patch, which is called, does with it."""
    report = tilenorm.patch(model)
    lines = set()
    for entry in (*report.patched, *report.left):
        name = entry.name.split(", ")[0].replace("the model", "")
        lines.add(_line(model.get_submodule(name), entry))
    return sorted(lines - {None})


def _line(module: nn.Module, entry: Patched | Left) -> str | None:
    if isinstance(entry, Patched):
        return f"`{entry.cls.__name__}`: {_text(entry.how)}"
    if any(True for _ in module.children()) and not [*module.parameters(recurse=False)]:
        return None
    return f"`{entry.cls.__name__}` is left: {shorten(_text(entry.reason), 120, placeholder=' …')}"


def _text(result: str) -> str:
    """A result without the values of eps and of sizes, in which norms of one class differ, and
    without the lines of files, in which versions of a library differ.
    """
    result = re.sub(r" in line \d+ of (\S+)", r" in \1", result)
    return re.sub(r" eps=\S+", "", re.sub(r"\[[\d, ]+\]", "[…]", result)).replace("|", "\\|")


def row(family: str, norms: list[str]) -> str:
    return f"| {family} | {'<br>'.join(norms)} |"


def title(norms: list[str]) -> str:
    """The section of the document that a family belongs to."""
    left = sum("` is left: " in line for line in norms)
    if not norms:
        return "Without norms"
    return "Patched" if not left else "Left" if left == len(norms) else "Partly patched"


def document() -> str:
    sections = {"Patched": [], "Partly patched": [], "Left": [], "Without norms": []}
    failed = []
    for family in families():
        try:
            model = built(family)
        except Exception:  # whatever a missing package or a missing argument leads to
            failed.append(family)
        else:
            norms = norms_of(model)
            sections[title(norms)].append(row(family, norms) if norms else family)
    without = sections.pop("Without norms")
    head = HEAD.format(versions=versions(), count=len(without) + sum(map(len, sections.values())))
    parts = [head]
    for name, rows in sections.items():
        table = "\n".join(["| family | norms |", "| :-- | :-- |", *rows])
        parts += [f"## {name}: {len(rows)}", table]
    parts += [f"## Without norms: {len(without)}", ", ".join(without)]
    parts += [f"## Not built: {len(failed)}"]
    parts += ["These need a package or arguments: " + ", ".join(failed)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.stdout.write(document())
