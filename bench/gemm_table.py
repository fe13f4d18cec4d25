"""The table of matrix multiplications that add a tensor, and what it says."""

from collections.abc import Sequence

from bench.lines import Gemm
from bench.text import table, titled

MOST_EXPOSED = 0.6  # of a read of C: more of it than that loses against a sum in the norm's kernel
LEAST_SAVED_US = 20.0
GRADIENTS = (("gate, up", "2 mm", "mm, addmm_"), ("q, k, v", "3 mm", "mm, 2 addmm_"))
RESIDUALS = (("down", "The block's output"), ("o", "x + attention"))
Times = dict[tuple[str, str], Gemm]


def table_of(gemms: Sequence[Gemm], markdown: bool) -> str:
    """The ways of each site, with the time beside that of the first way."""
    first, rows = {}, []
    for gemm in gemms:
        shown = [gemm.site, gemm.way]
        if gemm.median_us is None:
            rows.append([*shown, gemm.status, "-"])
            continue
        least = first.setdefault(gemm.site, gemm.median_us)
        time = f"{gemm.median_us:.1f} ({gemm.spread:.1%})"
        rows.append([*shown, time, f"{gemm.median_us - least:+.1f}"])
    notes = [f"{gemm.site}, {gemm.way}: {gemm.error}" for gemm in gemms if gemm.error]
    header = ["site", "way", "µs (spread)", "more than the site's first"]
    title = f"matrix multiplications that add a tensor, bfloat16: {gemms[0].sizes}"
    return titled(title, table(header, rows, markdown), notes + said(gemms), markdown)


def said(gemms: Sequence[Gemm]) -> list[str]:
    """What the times say, as far as they were measured."""
    times = {(gemm.site, gemm.way): gemm for gemm in gemms if gemm.median_us is not None}
    if ("C", "copy") not in times:
        return []
    read = times["C", "copy"].median_us / 2
    lines = [f"One read of C, half of the time of its copy: {read:.1f} µs."]
    sums = [*GRADIENTS, *((site, "mm", "addmm_") for site, _ in RESIDUALS)]
    for site, plain, adding in sums:
        if (share := exposed(times, read, [(site, plain, adding)])) is not None:
            lines.append(f"{site}: c = (({adding}) - ({plain})) / (reads of C) = {share:.2f}")
    if (share := exposed(times, read, GRADIENTS)) is not None:
        less = share < MOST_EXPOSED
        lines.append(
            f"Sums of gradients in the multiplications: {'' if less else 'not '}worth building,"
            f" because c = {share:.2f} of both, and the limit is {MOST_EXPOSED}."
        )
    for site, called in RESIDUALS:
        ways = [times.get((site, way)) for way in ("mm + add", "addmm_")]
        if all(ways):
            saved = ways[0].median_us - ways[1].median_us
            more = saved > LEAST_SAVED_US
            lines.append(
                f"{called} in the {site} multiplication: {'' if more else 'not '}worth building,"
                f" because it saves {saved:.1f} µs, and the limit is {LEAST_SAVED_US:.0f} µs."
            )
    return ["\n".join(lines)]


def exposed(times: Times, read: float, sites: Sequence[tuple[str, str, str]]) -> float | None:
    """The share of the reads of C that shows in the time: (adding - plain) / all reads of C."""
    longer, reads = 0.0, 0
    for site, plain, adding in sites:
        if not {(site, plain), (site, adding)} <= times.keys():
            return None
        longer += times[site, adding].median_us - times[site, plain].median_us
        reads += times[site, adding].addends
    return longer / (reads * read)
