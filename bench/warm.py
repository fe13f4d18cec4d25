"""Compiling before measuring: each call of a run once, untimed, in several processes at a time.

They leave compiled code where the run will look for it, and nothing that a time decided, since
they share the GPU. The caches of Triton, cuTile and quack hold the former alone, by source and
options. Inductor's holds the latter: best configurations, timings, and graphs with the split size
of a backward, which it times as it compiles. The processes' own is therefore thrown away, and the
run chooses as it would without them, from kernels most of which Triton has compiled by then.
"""

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from bench import worker
from bench.cases import LATENCIES, Case
from bench.first_call import measure
from bench.run import HOST_DTYPE, HOST_M, HOST_N

TIMEOUT_S = 3600.0


def up(
    cases: Sequence[Case],
    names: Mapping[str, Sequence[str]],
    directions: Sequence[str],
    device: str,
    jobs: int,
    max_seconds: float = math.inf,
) -> float:
    """Call what ``run`` will, in so many processes, for half of the time at most; returns the
    seconds spent. A failure is passed over: the run will meet it again, and show it."""
    start = time.monotonic()
    host = [Case(op, HOST_DTYPE, HOST_M, HOST_N) for op in dict.fromkeys(case.op for case in cases)]
    calls = [
        {"cases": [vars(case)], "provider": name, "directions": ways}
        for some, ways in ((cases, directions), (host, LATENCIES))
        for case in some
        for name in names[case.op]
    ]
    calls.sort(key=lambda call: call["provider"])  # each process gets as many of what takes long
    parts = [calls[job::jobs] for job in range(min(jobs, len(calls)))]
    # Triton's own default, which Inductor would change for the whole process once it compiles.
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.expanduser("~/.triton/cache"))
    print(f"compiling in {jobs} processes: ", end="", file=sys.stderr, flush=True)
    with worker.temporary_folder() as folder, ThreadPoolExecutor(jobs) as pool:
        places = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}

        def succeeded(part: list[dict]) -> int:
            left = min(TIMEOUT_S, max_seconds / 2 - (time.monotonic() - start))
            if left <= 0:
                return 0
            try:
                return worker.run(succeeding, left, places, calls=part, device=device)
            except Exception:
                return 0

        done = sum(pool.map(succeeded, parts))
    spent = time.monotonic() - start
    total = sum(len(call["directions"]) for call in calls)
    print(f"{done} of {total} calls in {spent:.0f} s", file=sys.stderr, flush=True)
    return spent


def succeeding(calls: list[dict], device: str) -> int:
    """In a process of its own: make the calls, and count those that succeed."""
    return sum(not line["error"] for call in calls for line in measure(device=device, **call))
