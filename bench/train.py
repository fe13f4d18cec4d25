"""``python -m bench train --pair A B`` compares two variants of a training step of a model.

The model is Llama 3 8B, or --model's. Both variants run in one process, over the same weights, with
their steps in turn. The command prints the median of the differences with its 95% interval,
tokens/s, the peak memory, and the kernels of each. Losses and gradients are compared first. A
second run compiles less, by the compilers' caches. A variant beside itself shows the bench's noise.

Variants: eager is PyTorch. compile is torch.compile. modules and liger have the modules of tilenorm
and of Liger in place of the norms. patch is tilenorm.patch, and patch-add also has it add the
residual. patch-modulation and patch-rotation add it, and modulate, or rotate queries and keys, in
the pass of the norms. patch-compile patches the model and gives it to torch.compile.
tilenorm-compile is tilenorm.compile, -low with memory="low", and -rotation with rotation=True. A
compiler compiles one layer for all layers, as torchtitan does, or, with --whole, the model as one
graph, which takes minutes. Modulation is of DiT-XL/2 and Flux, and norms of queries and keys before
a rotation are of Qwen3 and OLMo 2: in the other models, these variants replace no more than others.

With --parallel fsdp=4,tp=2 eight processes train the model, one a GPU: FSDP2 over four, each with a
batch of its own, and tensor parallelism with sequence parallelism over two, which Llama 3 8B, Qwen3
8B and OLMo 2 7B have. OLMo 2 normalises q and k as a whole, whose columns are cut: tilenorm's norms
take them so, and PyTorch's get them gathered. torchrun starts the processes:
torchrun --nproc-per-node 8 -m bench train --parallel fsdp=4,tp=2 --pair A B. The record has the
times of each process. A process that fails ends the run.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch._dynamo

from bench import command, pair, parallel, provenance, worker
from bench.pair import VARIANTS, Settings
from bench.record import Pair
from bench.shapes import LLAMA, MODELS, tiny

SIZES = ("layers", "batch", "length")


def main(argv: list[str]) -> int:
    device = provenance.device()
    args = _arguments(argv)
    if device == "cpu" and not args.tiny:
        sys.exit("there is no GPU, so give --tiny")
    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    ranks = parallel.joined(device) if args.parallel else nullcontext(0)
    with ranks as rank, command.running(args, ["train", *argv], quiet=rank > 0) as run:
        if device != "cpu" and args.parallel:
            parallel.serve_cut_rows()  # after `running`, which asks for the kernels
        for line in _pairs(args, device):
            run.emit(line)
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = command.parser("train", __doc__)
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
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[LLAMA])
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the command")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="default: the model's")
    parser.add_argument("--whole", action="store_true", help="compile the model as one graph")
    parser.add_argument("--deterministic", action="store_true", help="equal bits in every run")
    parser.add_argument("--parallel", type=parallel.sizes, metavar="fsdp=N,tp=N")
    args = parser.parse_args(argv)
    for name in (*SIZES, "pairs"):
        if (value := vars(args)[name]) is not None and value < 1:
            parser.error(f"--{name}: got {value}, takes at least 1")
    if parallel.PROCESSES > 1 and not args.parallel:
        parser.error("--parallel: torchrun's processes need it")
    for name in args.model if args.parallel else ():
        if why := parallel.unserved(MODELS[name], args.parallel, args.whole):
            parser.error(f"--parallel: {why}")
    return args


def _pairs(args: argparse.Namespace, device: str) -> Iterator[Pair]:
    """Each model and pair in a process of its own, whose end frees the memory."""
    deadline = time.time() + args.max_seconds
    for name in args.model:
        sizes = {size: vars(args)[size] for size in SIZES if vars(args)[size]}
        shape = replace(tiny(MODELS[name]) if args.tiny else MODELS[name], **sizes)
        how = {"deterministic": args.deterministic} | (args.parallel or {})
        settings = Settings(shape, name, args.whole, device, **how)
        for names in args.pair:
            print(f"{names[0]} and {names[1]}: {settings.label}", file=sys.stderr, flush=True)
            where = {"label": settings.label, "base": names[0], "variant": names[1]}
            where |= {"tokens": settings.tokens, "asked": args.pairs}
            if why := next(filter(None, map(pair.absent, names)), None):
                fields = {"status": "absent", "error": why}
            else:
                fields = _measured(settings, deadline, names=names, pairs=args.pairs)
            found = Pair(**where, **fields)
            print(f"{len(found.pairs_us)} of {found.asked} pairs", file=sys.stderr, flush=True)
            yield found


def _measured(given: Settings, deadline: float, **asked) -> dict:
    """The fields of ``pair.measure``, or why there are none."""
    if parallel.agreed(deadline <= time.time()):
        return {"status": "skipped", "error": "out of time"}
    if given.gpus > 1:  # each process is a worker already
        found = pair.measure(given=given, deadline=deadline, **asked)
        torch._dynamo.reset()
        gc.collect()  # what the next pair needs
        torch.cuda.empty_cache()
        return found
    try:
        return worker.until(deadline, pair.measure, given=given, **asked)
    except worker.WorkerError as error:
        return {"status": "failed", "error": str(error)}
