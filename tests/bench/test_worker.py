import os
import statistics
import subprocess
import time

import pytest

from bench import worker


def test_exceptions_of_the_function_and_deaths_of_its_process_are_raised_here():
    with pytest.raises(worker.WorkerError, match="StatisticsError: mean requires at least one"):
        worker.run(statistics.mean, 60.0, data=[])
    with pytest.raises(worker.WorkerError, match="exit status 3: no message"):
        worker.run(os._exit, 60.0, status=3)


def test_function_that_takes_too_long_is_ended_with_its_child_processes(tmp_path):
    log = tmp_path / "log"
    late = ["sh", "-c", f"sleep 1.5; echo still here > {log}"]
    with pytest.raises(worker.WorkerError, match="not done after 1 s"):
        worker.run(subprocess.run, 1.0, args=late)
    time.sleep(1.0)
    assert not log.exists()


def test_function_runs_with_caches_in_the_given_folder_or_empty_ones(tmp_path):
    for places in (worker.caches(str(tmp_path)), None):
        place = worker.run(os.getenv, 60.0, places, key="CUDA_TILE_CACHE_DIR")
        assert os.path.exists(place) == bool(places)
