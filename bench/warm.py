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
from bench.first_call import TIMEOUT_S, measure
from bench.run import HOST_DTYPE, HOST_M, HOST_N


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
    tasks: list[dict] = []
    for some, ways in ((cases, directions), (host, LATENCIES)):
        for name in dict.fromkeys(name for case in some for name in names[case.op]):
            found = [vars(case) for case in some if name in names[case.op]]
            # A process takes seconds to start: there is one a job, not one a case.
            for part in (found[job::jobs] for job in range(min(jobs, len(found)))):
                tasks.append({"cases": part, "provider": name, "directions": list(ways)})
    tasks.sort(key=lambda task: task["provider"] != "compile")  # what takes longest is first
    # Triton's own default, which Inductor would change for the whole process once it compiles.
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.expanduser("~/.triton/cache"))
    print(f"compiling in {jobs} processes: ", end="", file=sys.stderr, flush=True)
    with worker.temporary_folder() as folder, ThreadPoolExecutor(jobs) as pool:
        places = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}

        def succeeded(task: dict) -> int:
            left = max_seconds / 2 - (time.monotonic() - start)
            if left <= 0:
                return 0
            try:
                lines = worker.run(measure, min(left, TIMEOUT_S), places, device=device, **task)
            except Exception:
                return 0
            return sum(not line["error"] for line in lines)

        done = sum(pool.map(succeeded, tasks))
    spent = time.monotonic() - start
    calls = sum(len(task["cases"]) * len(task["directions"]) for task in tasks)
    print(f"{done} of {calls} calls in {spent:.0f} s", file=sys.stderr, flush=True)
    return spent
