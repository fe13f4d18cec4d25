"""GB/s against N as an SVG: a column a direction, a row an op and dtype."""

from bench.cases import DIRECTIONS
from bench.record import Record
from bench.report import CPU_NOTICE, OURS

# Okabe and Ito's palette, which survives the common kinds of colour blindness; markers differ too.
_STYLES = {
    "torch": ("#000000", "s"),
    "compile": ("#0072B2", "^"),
    "quack": ("#D55E00", "v"),
    "liger": ("#CC79A7", "D"),
    "liger-cutile": ("#56B4E9", "P"),
    "tilegym": ("#E69F00", "X"),
    OURS: ("#009E73", "o"),  # last, so drawn on top
}


def save(record: Record, path: str) -> None:
    """Write the plot of a record; needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    cells = [cell for cell in record.cells if cell.direction in DIRECTIONS]
    if not cells:
        raise ValueError("nothing to plot: no forward or backward was measured in GB/s")
    rows = list(dict.fromkeys((cell.op, cell.dtype) for cell in cells))
    columns = [d for d in DIRECTIONS if any(cell.direction == d for cell in cells)]
    figure, axes = plt.subplots(
        len(rows), len(columns), figsize=(6 * len(columns), 4.2 * len(rows)), squeeze=False
    )
    for (op, dtype), line in zip(rows, axes, strict=True):
        for direction, ax in zip(columns, line, strict=True):
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
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)


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
