"""The command line of ``python -m bench train``: what it asks for, checked before anything runs."""

import argparse
import math
import sys
from dataclasses import dataclass, replace

from bench.shapes import LLAMA, MODELS, Model, tiny
from bench.step import OPTIMIZERS, Settings
from bench.variants import VARIANTS, lacking

TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Asked:
    """What a command asks for: the settings of each model, and the pairs of variants."""

    settings: list[Settings]
    pairs: list[tuple[str, str]]
    pair_count: int
    max_seconds: float
    timeout: float
    out: str | None
    markdown: bool


def parsed(argv: list[str], description: str, device: str) -> Asked:
    parser = _parser(description)
    args = parser.parse_args(argv)
    for name in ("layers", "batch", "length", "warm_up", "pairs"):
        if (value := vars(args)[name]) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: got {value}, takes at least 1")
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout: got {args.dropout}, takes 0 to 1, without 1")
    for name in dict.fromkeys(name for names in args.pair for name in names):
        if why := lacking(name):
            parser.error(f"--pair: {why}")
    if device == "cpu" and not args.tiny:
        sys.exit("there is no GPU, so give --tiny")
    return Asked(
        settings=[_settings(args, name, device) for name in args.model],
        pairs=[tuple(names) for names in args.pair],
        pair_count=args.pairs,
        max_seconds=args.max_seconds,
        timeout=args.timeout,
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
    parser.add_argument(
        "--pair",
        nargs=2,
        choices=VARIANTS,
        action="append",
        required=True,
        metavar=("A", "B"),
        help="compare these two variants; may be given several times",
    )
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps; default: 40")
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=math.inf,
        help="start no pair of steps after this time; default: no end",
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[LLAMA])
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes, to try the command: no measurement"
    )
    for name in ("layers", "batch", "length"):
        parser.add_argument(f"--{name}", type=int, help="default: the model's")
    parser.add_argument("--dropout", type=float, default=0.0, help="before each sum; default: 0")
    for name in ("warm-up", "seed"):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=default.optimizer)
    parser.add_argument(
        "--checkpointing", action="store_true", help="checkpoint the activations of every layer"
    )
    parser.add_argument("--whole", action="store_true", help="compile the model as one graph")
    parser.add_argument(
        "--deterministic", action="store_true", help="use PyTorch's deterministic algorithms"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        help=f"seconds that a pair of variants may take; default: {TIMEOUT_S:.0f}",
    )
    parser.add_argument("--out", metavar="FILE.jsonl", help="write the record")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    return parser


def _settings(args: argparse.Namespace, name: str, device: str) -> Settings:
    """The settings of a model, with the sizes that the command gives."""
    model: Model = tiny(MODELS[name]) if args.tiny else MODELS[name]
    layers = args.layers or model.shape.layers
    given = {name: value for name, value in vars(args).items() if name in vars(Settings())}
    given |= {"shape": replace(model.shape, layers=layers, dropout=args.dropout), "model": name}
    given |= {"batch": args.batch or model.batch, "length": args.length or model.length}
    return Settings(**given | {"device": device})
