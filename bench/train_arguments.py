"""The command line of ``python -m bench train``: what it asks for, checked before anything runs."""

import argparse
import math
import os
import sys
from dataclasses import dataclass, replace

import torch

from bench import parallel
from bench.shapes import LLAMA, MODELS, Model, tiny
from bench.step import OPTIMIZERS, Settings
from bench.variants import VARIANTS, lacking

DEFAULT_VARIANTS = ("eager", "compile", "patch", "patch-compile")
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "dropout")
# The rest of the memory is for the allocator's fragments, cuBLAS's workspaces, and CUDA itself.
MEMORY_SHARE = 0.92
# Bytes of a logit and its gradient, which exist in bfloat16 and, in the cross entropy, in float32.
LOGIT_BYTES = 16
VARIANT_TIMEOUT_S, PAIR_TIMEOUT_S = 240.0, 1800.0


@dataclass(frozen=True)
class Asked:
    """What a command asks for: the settings of each model, and the variants or the pairs."""

    settings: list[Settings]
    variants: list[str]
    pairs: list[tuple[str, str]]
    pair_count: int
    max_seconds: float
    timeout: float
    parallel: str
    out: str | None
    markdown: bool


def parsed(argv: list[str], description: str, device: str) -> Asked:
    parser = _parser(description)
    args = parser.parse_args(argv)
    for name, least in (("layers", 1), ("batch", 1), ("warm_up", 1), ("steps", 2), ("pairs", 1)):
        if (value := vars(args)[name]) is not None and value < least:
            parser.error(f"--{name.replace('_', '-')}: got {value}, takes at least {least}")
    if not 0 <= (args.dropout or 0) < 1:
        parser.error(f"--dropout: got {args.dropout}, takes 0 to 1, without 1")
    pairs = args.pair or []
    if args.max_seconds is not None and not pairs:
        parser.error("--max-seconds: is for --pair")
    models = {name: _model(args, name) for name in args.model}
    for model in models.values():
        _check_sizes(model, parser)
    for name in dict.fromkeys(n for names in pairs or [args.variant] for n in names):
        if why := lacking(name):
            parser.error(f"--{'pair' if pairs else 'variant'}: {why}")
    if args.parallel:
        _check_parallel(args, models, parser)
    return Asked(
        settings=[_settings(args, name, model, device) for name, model in models.items()],
        variants=args.variant,
        pairs=[tuple(names) for names in pairs],
        pair_count=args.pairs,
        max_seconds=math.inf if args.max_seconds is None else args.max_seconds,
        timeout=args.timeout or (PAIR_TIMEOUT_S if pairs else VARIANT_TIMEOUT_S),
        parallel=args.parallel,
        out=args.out,
        markdown=args.markdown,
    )


def _parser(description: str) -> argparse.ArgumentParser:
    default = Settings()
    parser = argparse.ArgumentParser(
        "python -m bench train",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--variant", nargs="+", choices=VARIANTS, default=DEFAULT_VARIANTS)
    what.add_argument(
        "--pair",
        nargs=2,
        choices=VARIANTS,
        action="append",
        metavar=("A", "B"),
        help="compare these two variants in one process; may be given several times",
    )
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps; default: 40")
    parser.add_argument(
        "--max-seconds", type=float, help="start no pair of steps after this time; default: no end"
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[LLAMA])
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes, to try the command: no measurement"
    )
    parser.add_argument("--layers", type=int, help="default: as many as fit in the memory")
    for name in ("hidden", "heads", "kv-heads", "ffn", "vocab", "batch", "length"):
        parser.add_argument(f"--{name}", type=int, help="default: the model's")
    parser.add_argument("--dropout", type=float, help="before each sum; default: 0")
    for name in ("warm-up", "steps", "seed"):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=default.optimizer)
    parser.add_argument(
        "--checkpointing", action="store_true", help="checkpoint the activations of every layer"
    )
    parser.add_argument("--parallel", choices=parallel.KINDS, default="", help="under torchrun")
    parser.add_argument("--whole", action="store_true", help="compile the model as one graph")
    parser.add_argument(
        "--deterministic", action="store_true", help="use PyTorch's deterministic algorithms"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        help=f"seconds that a variant may take, or a pair; default: {VARIANT_TIMEOUT_S:.0f},"
        f" or {PAIR_TIMEOUT_S:.0f}",
    )
    parser.add_argument("--out", metavar="FILE.jsonl", help="write the record")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    return parser


def _model(args: argparse.Namespace, name: str) -> Model:
    """A model with the sizes that the command gives."""
    model = tiny(MODELS[name]) if args.tiny else MODELS[name]
    given = {size: vars(args)[size] for size in SIZES if vars(args)[size] is not None}
    shape = replace(model.shape, **given)
    return Model(shape, args.batch or model.batch, args.length or model.length)


def _check_sizes(model: Model, parser: argparse.ArgumentParser) -> None:
    shape = model.shape
    for name, part in (("hidden", "heads"), ("heads", "kv_heads")):
        whole, count = getattr(shape, name), getattr(shape, part)
        if whole % count:
            parser.error(
                f"--{name}: got {whole}, takes a multiple of --{part.replace('_', '-')}, {count}"
            )


def _check_parallel(
    args: argparse.Namespace, models: dict[str, Model], parser: argparse.ArgumentParser
) -> None:
    if "WORLD_SIZE" not in os.environ:
        parser.error(
            "--parallel: start it by torchrun --nproc-per-node 2 -m bench train --parallel …"
        )
    if args.pair:
        parser.error("--pair: is for a single process, not for --parallel")
    if [*models] != [LLAMA]:
        parser.error(f"--model: got {', '.join(models)}, takes {LLAMA} alone with --parallel")
    if args.whole:
        parser.error("--whole: one graph of the model is for a single process, not for --parallel")
    if len({*args.variant}) < len(args.variant):
        parser.error("--variant: got a variant twice, takes each once with --parallel")
    sizes = vars(models[LLAMA].shape) | {"length": models[LLAMA].length}
    for name in ("heads", "kv_heads", "ffn", "vocab", "length") if args.parallel == "tp" else ():
        if sizes[name] % parallel.ranks():
            parser.error(
                f"--{name.replace('_', '-')}: got {sizes[name]}, takes a multiple of the"
                f" number of ranks, {parallel.ranks()}"
            )


def _settings(args: argparse.Namespace, name: str, model: Model, device: str) -> Settings:
    given = {name: value for name, value in vars(args).items() if name in vars(Settings())}
    given |= {"shape": model.shape, "model": name, "batch": model.batch, "length": model.length}
    given |= {"device": device, "ranks": parallel.ranks() if args.parallel else 1}
    settings = Settings(**given)
    if args.layers or args.tiny:
        return settings
    if device == "cpu":
        sys.exit("there is no GPU, so give --tiny, or --layers and small --hidden, --ffn, --vocab")
    memory = torch.cuda.get_device_properties(device).total_memory
    fitting = fitting_layers(settings, memory)
    return replace(settings, shape=replace(settings.shape, layers=fitting))


def fitting_layers(settings: Settings, memory: int) -> int:
    """An estimate of how many of the model's layers fit in ``memory`` bytes; at least 1."""
    shape, tokens = settings.shape, settings.batch * settings.length
    state = OPTIMIZERS[settings.optimizer].bytes_per_parameter / settings.ranks
    kept = shape.hidden if settings.checkpointing else shape.layer_activations
    logits = (settings.batch if shape.images else tokens) * shape.vocab
    fixed = shape.other_parameters(settings.length) * state + logits * LOGIT_BYTES
    if settings.checkpointing:  # the layer that is being recomputed
        fixed += tokens * shape.layer_activations * torch.bfloat16.itemsize
    if settings.parallel == "fsdp":  # two layers and their gradients are whole at a time
        fixed += 4 * shape.layer_parameters * torch.bfloat16.itemsize
    layer = shape.layer_parameters * state + tokens * kept * torch.bfloat16.itemsize
    return max(1, min(shape.layers, int((memory * MEMORY_SHARE - fixed) // layer)))
