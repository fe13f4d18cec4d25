"""The table of training steps in a report."""

from collections.abc import Sequence

from bench.record import Step
from bench.text import table, titled

LLAMA_FORM = "Llama 3's form"  # records do not name it


def table_of(steps: Sequence[Step], markdown: bool) -> str:
    """The table of the variants of one model."""
    eager = next((step.losses for step in steps if step.variant == "eager"), [])
    header = ["variant", "ms a step (spread)", "tokens/s", "norms, ms a step", "peak GiB"]
    header += ["first step, s", "loss", "largest change from eager's", "same bits twice"]
    several = any(step.ranks for step in steps)
    header += ["ms a step of each rank", "peak GiB of each rank"] if several else []
    rows = []
    for step in steps:
        if step.median_us is None:
            rows.append([step.variant, step.status, *["-"] * (len(header) - 2)])
            continue
        norms = sum(step.norm_kernels_ms.values())
        row = [
            step.variant,
            f"{step.median_us / 1e3:.1f} ({step.spread:.1%})",
            f"{step.tokens / step.median_us * 1e6:.0f}",
            f"{norms:.2f} ({norms * 1e3 / step.median_us:.1%})" if norms else "-",
            f"{step.peak_bytes / 2**30:.1f}" if step.peak_bytes else "-",
            f"{step.first_s:.1f}",
            f"{step.losses[0]:.4f} to {step.losses[-1]:.4f}",
            _largest_change(step.losses, eager),
            "yes" if step.same_bits else "no",
        ]
        if several:
            row.append(", ".join(f"{rank['median_us'] / 1e3:.1f}" for rank in step.ranks))
            row.append(", ".join(f"{rank['peak_bytes'] / 2**30:.2f}" for rank in step.ranks))
        rows.append(row)
    notes = [
        "Norms: the GPU time of all kernels whose name contains the name of a norm. torch.compile\n"
        "fuses other operations into these kernels, and their share of the time is not known.",
    ]
    if several:
        notes.append(
            "Several ranks: the time is the slowest rank's; the losses and norms are rank 0's.\n"
            "Peak: the GPU's allocated memory; on a CPU, all memory of a rank's process."
        )
    notes += [f"{step.variant}: {step.error}" for step in steps if step.error]
    named = "'s form: " in steps[0].model
    title = f"training step of {'' if named else f'{LLAMA_FORM}: '}{steps[0].model}"
    return titled(title, table(header, rows, markdown), notes, markdown)


def _largest_change(losses: Sequence[float], eager: Sequence[float]) -> str:
    changes = [abs(loss - other) for loss, other in zip(losses, eager, strict=False)]
    return f"{max(changes):.2g}" if changes else "-"
