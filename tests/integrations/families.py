"""Prints which families of models have norms that patch replaces.

    python -m tests.integrations.families > .github/families.md
    python -m tests.integrations.families --long llama t5

The first command prints the index. The second one prints what patch does with each class of norm,
in the families that it names, or in all.

Every family of transformers is built with its default config, and every class of models of
diffusers with its default arguments. The weights are on the meta device, where they take neither
memory nor time. patch looks at norms on the CPU.
"""

import argparse
import inspect
import re
import sys
from collections import defaultdict
from pathlib import Path
from textwrap import shorten

import torch
import transformers
from torch import nn

import tilenorm
from tilenorm.integrations.patch.models import Left, Patched

FILE = Path(__file__).parents[2] / ".github" / "families.md"
LEFT = "` is left: "  # between the class of a norm and the reason
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

This index says what `tilenorm.patch` does with the norms of {count} families of models: those of
transformers, which have the lower-case name of their config, and the classes of models of
diffusers. Search it for yours. A module without parameters that contains other modules, such as
AdaLayerNormZero, is not listed, but the norm in it is.

`python -m tests.integrations.families --long llama t5` prints the options of the function that
replaces each class of norm in a family, and the file of each exception.
`python -m tests.integrations.families > .github/families.md` writes this file. It was last run with
{versions}."""
# What stands below the title of a section.
ABOUT = {
    "Patched": "All norms are replaced. A paragraph begins with the functions that replace them.",
    "Partly patched": "A paragraph gives a reason, and the norms that are left for it. The other\n"
    "norms of these families are replaced. A family with two reasons stands in two paragraphs.",
    "Left": "No norm is replaced.",
    "Without norms": "",
    "Not built": "These need a package or arguments.",
}
Place = tuple[str, str, str]  # a section, the beginning of a paragraph in it, a class of norm or ""


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
    return f"`{entry.cls.__name__}{LEFT}{shorten(_text(entry.reason), 120, placeholder=' …')}"


def _text(result: str) -> str:
    """A result without the values of eps and of sizes, in which norms of one class differ, and
    without the lines of files, in which versions of a library differ.
    """
    result = re.sub(r" in line \d+ of (\S+)", r" in \1", result)
    return re.sub(r" eps=\S+", "", re.sub(r"\[[\d, ]+\]", "[…]", result)).replace("|", "\\|")


def title(norms: list[str]) -> str:
    """The section of the index that a family belongs to."""
    left = sum(LEFT in line for line in norms)
    if not norms:
        return "Without norms"
    return "Patched" if not left else "Left" if left == len(norms) else "Partly patched"


def places(norms: list[str] | None) -> set[Place]:
    """Where a family stands in the index: by the lines of norms_of; None if it was not built."""
    if norms is None:
        return {("Not built", "", "")}
    section = title(norms)
    if section == "Patched":
        functions = sorted({line.partition("`: ")[2].split()[0] for line in norms})
        return {(section, " and ".join(functions), "")}
    # The index has no file of an exception: most files would be a paragraph of their own.
    left = [
        re.sub(r"(raised \w+) in \S+$", r"\1", line[1:]).split(LEFT)
        for line in norms
        if LEFT in line
    ]
    return {(section, reason, cls) for cls, reason in left} or {(section, "", "")}


def index(results: dict[str, list[str] | None]) -> str:
    """The text of the file. results: the lines of norms_of by family."""
    names: dict[Place, list[str]] = defaultdict(list)
    for family, norms in results.items():
        for place in sorted(places(norms)):
            names[place].append(family)
    count = sum(norms is not None for norms in results.values())
    parts = [HEAD.format(versions=versions(), count=count)]
    for section, about in ABOUT.items():
        paragraphs: dict[str, list[str]] = defaultdict(list)
        for (_, head, cls), families in names.items():
            if _ == section:
                paragraphs[head].append(
                    f"`{cls}` in {', '.join(families)}" if cls else ", ".join(families)
                )
        total = {f for (name, *_), families in names.items() if name == section for f in families}
        parts += [f"## {section}: {len(total)}", *filter(None, [about])]
        for head, items in sorted(paragraphs.items(), key=lambda entry: -len(str(entry[1]))):
            parts.append(f"**{head}:** " * bool(head) + "; ".join(items))
    return "\n\n".join(parts) + "\n"


def read(text: str) -> dict[str, set[Place]]:
    """Where each family stands in an index."""
    result: dict[str, set[Place]] = defaultdict(set)
    for part in text.split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        section = heading.partition(":")[0]
        for paragraph in filter(None, body.replace(ABOUT[section], "").split("\n\n")):
            head, items = re.fullmatch(
                r"(?:\*\*(.*?):\*\* )?(.*)", paragraph.strip(), re.DOTALL
            ).groups()
            for item in items.split("; "):
                cls, names = re.fullmatch(r"(?:`(\w+)` in )?(.*)", item).groups()
                for name in filter(None, names.split(", ")):
                    result[name].add((section, head or "", cls or ""))
    return result


def results_of(names: list[str]) -> dict[str, list[str] | None]:
    """The lines of norms_of for each family of a list."""
    results = {}
    for name in names:
        try:
            model = built(name)
        except Exception:  # whatever a missing package or a missing argument leads to
            results[name] = None
        else:
            results[name] = norms_of(model)
    return results


def table(results: dict[str, list[str] | None]) -> str:
    """The long form: a row for each family."""
    rows = [f"| {name} | {'<br>'.join(norms or [])} |" for name, norms in results.items()]
    return "\n".join(["| family | norms |", "| :-- | :-- |", *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.integrations.families", description=__doc__
    )
    parser.add_argument("family", nargs="*", help="the families to look at; all by default")
    parser.add_argument("--long", action="store_true", help="print each class of norm")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    results = results_of(options.family or families())
    sys.stdout.write((table if options.long else index)(results))


if __name__ == "__main__":
    main()
