from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bench import timing


def test_summary_is_the_median_and_the_spread_of_the_middle_three_fifths():
    found = timing.summarize([1.0, 2.0, 3.0, 4.0, 5.0, 100.0], "clock")
    assert (found["median_us"], found["samples"]) == (3.5, 6)
    assert found["spread"] == pytest.approx((5.0 - 2.0) / 3.5)


def test_rotating_sets_exceed_the_cache(monkeypatch):
    properties = SimpleNamespace(L2_cache_size=60 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = [timing.rotating_sets(nbytes, "cuda") for nbytes in (1 << 30, 61 << 20, 1 << 10)]
    assert found == [2, 4, timing.MOST_SETS]


def test_clock_calls_every_set_in_turn():
    seen = []
    made = iter((lambda: seen.append(0), lambda: seen.append(1)))
    found = timing.measure(made.__next__, 1, "cpu")
    assert found["timing"] == "clock"
    assert seen[:3] == [0, 1, 0]  # warm-up, and how long a call takes
    assert seen[3:] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(("call_s", "count"), [(1e-5, 40 * 20), (1e-3, 4 * 6), (0.5, 3)])
def test_host_time_of_slow_calls_has_fewer_samples_of_fewer_calls(monkeypatch, call_s, count):
    now, made = [0.0], []

    def call():
        now[0] += call_s
        made.append(now[0])

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "CPU_BUDGET_S", 0.02)
    found = timing.host(call, "cpu", samples=40, calls=20)
    assert found["us"] == pytest.approx(call_s * 1e6)
    assert found["spread"] == pytest.approx(0.0, abs=1e-6)
    assert len(made) == 2 + count


def test_gpu_time_comes_from_a_graph(gpu):
    x = torch.randn(1 << 22, device=gpu)
    with torch.cuda.stream(torch.cuda.Stream()):
        found = timing.measure(lambda: partial(x.clone().copy_, x.clone()), 8 << 22, gpu)
    assert (found["timing"], found["error"]) == ("graph", "")
    assert 1.0 < found["median_us"] < 10_000.0


def test_work_on_another_stream_is_noticed(gpu):
    x = torch.randn(1 << 22, device=gpu)
    y, other = torch.empty_like(x), torch.cuda.Stream()

    def stray():
        with torch.cuda.stream(other):
            return y.copy_(x)

    with torch.cuda.stream(torch.cuda.Stream()):
        found = timing.measure(lambda: stray, 8 << 22, gpu)
    assert found["timing"] == "events"
    assert "does not write" in found["error"]
