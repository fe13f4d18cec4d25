"""GB/s against N as an SVG file: a row for each direction, a column for each op and dtype."""

import hashlib

from bench.op import DIRECTIONS
from bench.record import Cell, Record
from bench.report import CPU_NOTICE, OURS, ops_and_dtypes

# The palette of Okabe and Ito, which readers with the common kinds of colour blindness can tell
# apart. The markers differ too.
_STYLES = {
    "torch": ("#000000", "s"),
    "compile": ("#0072B2", "^"),
    "quack": ("#D55E00", "v"),
    "liger": ("#CC79A7", "D"),
    "liger-cutile": ("#56B4E9", "P"),
    "tilegym": ("#E69F00", "X"),
    "tilenorm+cast": ("#999999", "<"),
    "flashinfer": ("#F0E442", ">"),
    OURS: ("#009E73", "o"),  # the last line is drawn on top
}


def digest(record: Record) -> str:
    """A digest of everything that the plot of a record shows."""
    shown = [(c.op, c.dtype, c.direction, c.provider, c.n, c.gbps) for c in _plotted(record)]
    copies = [(copy.dtype, copy.n, copy.gbps) for copy in record.copies]
    return hashlib.sha256(repr((sorted(map(repr, shown)), copies)).encode()).hexdigest()[:16]


def save(record: Record, path: str) -> None:
    """Write the plot of a record; needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    cells = _plotted(record)
    if not cells:
        raise ValueError("nothing to plot: no forward or backward was measured in GB/s")
    columns = ops_and_dtypes(cells)
    rows = [d for d in DIRECTIONS if any(cell.direction == d for cell in cells)]
    size = 5 * len(columns), 3.6 * len(rows)
    figure, axes = plt.subplots(len(rows), len(columns), figsize=size, squeeze=False)
    for direction, line in zip(rows, axes, strict=True):
        for (op, dtype), ax in zip(columns, line, strict=True):
            _panel(ax, record, op, dtype, direction)
    named = {}
    for ax in axes.flat:
        named |= {label: h for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(
        named.values(), named, loc="outside lower center", ncols=len(named), frameon=False
    )
    last = max(record.runs, key=lambda run: run["date"])
    notice = CPU_NOTICE if record.on_cpu else last["date"][:10]
    figure.suptitle(f"{last['machine']}, {notice}")
    figure.set_layout_engine("constrained")
    metadata = {"Date": None, "Description": f"digest {digest(record)}"}
    figure.savefig(path, format="svg", metadata=metadata)
    plt.close(figure)


def _plotted(record: Record) -> list[Cell]:
    return [cell for cell in record.cells if cell.direction in DIRECTIONS]


def _panel(ax, record: Record, op: str, dtype: str, direction: str) -> None:
    cells = [c for c in record.cells if (c.op, c.dtype, c.direction) == (op, dtype, direction)]
    shapes = {(dtype, c.m, c.n) for c in cells}
    copies = sorted((c.n, c.gbps) for c in record.copies if (c.dtype, c.m, c.n) in shapes)
    if copies:
        ax.plot(*zip(*copies, strict=True), color="#777777", linestyle="--", label="copy")
    for name, (color, marker) in _STYLES.items():
        points = sorted((c.n, c.gbps) for c in cells if c.provider == name and c.gbps is not None)
        if points:
            strong = {"linewidth": 2.6, "markersize": 7} if name == OURS else {"linewidth": 1.2}
            style = {"color": color, "marker": marker, "markersize": 5, **strong}
            ax.plot(*zip(*points, strict=True), label=name, **style)
    sizes = sorted({cell.n for cell in cells if cell.n & (cell.n - 1) == 0})
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [f"{n >> 10}K" if n >= 1024 else str(n) for n in sizes])
    ax.set_ylim(bottom=0)
    ax.set_title(f"{op} {direction}, {dtype}")
    ax.set_xlabel("N, columns of a row")
    ax.set_ylabel("GB/s")
    ax.grid(alpha=0.25)
