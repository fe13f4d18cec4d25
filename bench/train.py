"""``python -m bench train`` measures a training step of a model with the shape of Llama 3 8B.

Every variant runs in its own process with empty caches. It starts from the same weights, and sees
the same tokens at every step, so that the loss falls. The model has as many of the 32 layers as fit
in the GPU's memory by an estimate, or --layers.

Variants: eager is PyTorch. compile is torch.compile. tilenorm patches the model. tilenorm-compile
patches the model and compiles it. tilenorm-graph gives the model to tilenorm.compile; it is not a
default variant. A compiler compiles one layer for all layers, as torchtitan does. With --whole it
compiles the model as one graph, which takes minutes for many layers.

The command also measures one norm alone, forward and backward, on 8 x 4096 tokens.

`torchrun --nproc-per-node N -m bench train --parallel fsdp`, or `tp`, measures the same step on N
GPUs, without the norm alone. With fsdp each rank has a batch of its own. With tp, which is tensor
and sequence parallelism, all ranks share one. Without GPUs the ranks are processes on the CPU.
"""

import argparse
import os
import sys
from dataclasses import asdict, replace

import torch

from bench import parallel, provenance, record, report, run, worker
from bench.cases import SUITES, Case
from bench.llama import Shape
from bench.providers import attendance
from bench.record import Cell, Copy, Step
from bench.step import OPTIMIZERS, VARIANTS, Settings, measure

DEFAULT_VARIANTS = ("eager", "compile", "tilenorm", "tilenorm-compile")
LAYER_PROVIDERS = ("tilenorm", "torch", "compile")
# The rest of the memory is for the allocator's fragments, cuBLAS's workspaces, and CUDA itself.
MEMORY_SHARE = 0.92
# Bytes of a logit and its gradient, which exist in bfloat16 and, in the cross entropy, in float32.
LOGIT_BYTES = 16
CPU_ELEMENTS = 1 << 16


def fitting_layers(settings: Settings, memory: int) -> int:
    """An estimate of how many of the model's layers fit in ``memory`` bytes; at least 1."""
    shape, tokens = settings.shape, settings.batch * settings.length
    state = OPTIMIZERS[settings.optimizer].bytes_per_parameter / settings.ranks
    kept = shape.hidden if settings.checkpointing else shape.layer_activations
    fixed = shape.other_parameters * state + tokens * shape.vocab * LOGIT_BYTES
    if settings.checkpointing:  # the layer that is being recomputed
        fixed += tokens * shape.layer_activations * torch.bfloat16.itemsize
    if settings.parallel == "fsdp":  # two layers and their gradients are whole at a time
        fixed += 4 * shape.layer_parameters * torch.bfloat16.itemsize
    layer = shape.layer_parameters * state + tokens * kept * torch.bfloat16.itemsize
    return max(1, min(shape.layers, int((memory * MEMORY_SHARE - fixed) // layer)))


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    device = provenance.device()
    settings = _settings(args, device)
    made = provenance.describe_run(device, ["train", *argv], {})
    first = not settings.parallel or parallel.rank() == 0  # the others measure, and say nothing
    with record.writing(args.out if first else None, made) as (found, emit):
        if not settings.parallel:
            _say(f"a norm of {settings.shape.hidden} alone")
            for line in _isolated(settings, args.timeout):
                emit(line)
        for variant in args.variant:
            if first:
                _say(f"{variant}: {settings.name}")
            emit(_step(settings, variant, args.timeout))
    if first:
        print(report.render(found, args.markdown))
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    default, shape = Settings(), Shape()
    parser = argparse.ArgumentParser(
        "python -m bench train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=DEFAULT_VARIANTS)
    parser.add_argument("--layers", type=int, help="default: as many as fit in the memory")
    for name in ("hidden", "heads", "kv-heads", "ffn", "vocab"):
        parser.add_argument(f"--{name}", type=int, default=getattr(shape, name.replace("-", "_")))
    for name in ("batch", "length", "warm-up", "steps", "seed"):
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
        "--timeout", type=float, default=240.0, help="seconds that a variant may take"
    )
    parser.add_argument("--out", metavar="FILE.jsonl", help="write the record")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    args = parser.parse_args(argv)
    for name, least in (("layers", 1), ("batch", 1), ("warm_up", 1), ("steps", 2)):
        if (value := vars(args)[name]) is not None and value < least:
            parser.error(f"--{name.replace('_', '-')}: got {value}, takes at least {least}")
    for whole, part in (("hidden", "heads"), ("heads", "kv_heads")):
        if vars(args)[whole] % vars(args)[part]:
            parser.error(
                f"--{whole}: got {vars(args)[whole]}, takes a multiple of "
                f"--{part.replace('_', '-')}, {vars(args)[part]}"
            )
    if args.parallel:
        _check_parallel(args, parser)
    return args


def _check_parallel(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if "WORLD_SIZE" not in os.environ:
        parser.error(
            "--parallel: start it by torchrun --nproc-per-node 2 -m bench train --parallel …"
        )
    if args.whole:
        parser.error("--whole: one graph of the model is for a single process, not for --parallel")
    if len({*args.variant}) < len(args.variant):
        parser.error("--variant: got a variant twice, takes each once with --parallel")
    for name in ("heads", "kv_heads", "ffn", "vocab", "length") if args.parallel == "tp" else ():
        if vars(args)[name] % parallel.ranks():
            parser.error(
                f"--{name.replace('_', '-')}: got {vars(args)[name]}, takes a multiple of the"
                f" number of ranks, {parallel.ranks()}"
            )


def _settings(args: argparse.Namespace, device: str) -> Settings:
    given = {name: value for name, value in vars(args).items() if name in vars(Settings())}
    sizes = {name: vars(args)[name] for name in vars(Shape()) if vars(args)[name] is not None}
    ranks = parallel.ranks() if args.parallel else 1
    settings = Settings(**given, shape=Shape(**sizes), device=device, ranks=ranks)
    if args.layers:
        return settings
    if device == "cpu":
        sys.exit("there is no GPU, so give --layers, and small --hidden, --ffn and --vocab")
    memory = torch.cuda.get_device_properties(device).total_memory
    fitting = fitting_layers(settings, memory)
    return replace(settings, shape=replace(settings.shape, layers=fitting))


def _isolated(settings: Settings, timeout_s: float) -> list:
    """The lines of a norm's forward and backward without a model around it."""
    case = replace(SUITES["layer"][0], n=settings.shape.hidden)
    if settings.device == "cpu":
        case = case.shrunk(CPU_ELEMENTS)
    try:
        lines = worker.run(isolated, timeout_s, case=vars(case), device=settings.device)
    except worker.WorkerError as error:
        _say(f"the norm alone failed: {error}")
        return []
    return [record.from_json(line) for line in lines]


def isolated(case: dict, device: str) -> list[str]:
    """The lines of a record. Runs in a worker process."""
    lines, case = [], Case(**case)
    present, _ = attendance([case.op], LAYER_PROVIDERS, device)
    run.run([case], present, ("training",), device, lines.append)
    return [record.to_json(line) for line in lines if isinstance(line, Cell | Copy)]


def _step(settings: Settings, variant: str, timeout_s: float) -> Step:
    where = {"model": settings.name, "variant": variant, "tokens": settings.tokens}
    arguments = {"variant": variant, "settings": asdict(settings)}
    try:
        return Step(**where, **worker.run(measure, timeout_s, **arguments))
    except worker.WorkerError as error:
        return Step(**where, status="failed", error=str(error))


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
