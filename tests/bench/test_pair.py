"""bench train --pair: the alternation with a timer of its own, and tiny models on the CPU."""

import random
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

import tilenorm
from bench import pair, train, variants
from bench.gradients import LEAST_SIZE, changes_of
from bench.models import Transformer
from bench.pair import alternated
from bench.shapes import LLAMA, MODELS, tiny
from bench.step import Settings
from bench.timing import Timer
from bench.variants import VARIANTS, Variant, lacking, twin

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
FOREVER = float("inf")


class Clock(Timer):
    """A timer whose time passes when a step says so. ``waited`` has the marks that it awaited."""

    def __init__(self):
        super().__init__("cpu")
        self.now, self.order, self.waited = 0.0, [], []

    def mark(self):
        return self.now

    def wait(self, mark):
        self.waited.append(mark)

    def between(self, start, end):
        return end - start

    def step(self, name, us):
        def run():
            self.order.append(name)
            self.now += us()

        return run


def test_each_variant_is_first_in_every_second_pair_and_times_are_its_own():
    clock, times = Clock(), {"A": iter(range(100, 200)), "B": iter(range(500, 600))}
    steps = [clock.step(name, lambda name=name: next(times[name])) for name in "AB"]
    found, peaks = alternated(steps, 5, clock, FOREVER)
    assert "".join(clock.order) == "ABBAABBAAB"
    assert found == [[100 + i, 500 + i] for i in range(5)]
    assert peaks == [None, None]


def test_host_is_at_most_one_pair_ahead_and_all_pairs_are_awaited():
    clock = Clock()
    alternated([clock.step("A", lambda: 2.0), clock.step("B", lambda: 3.0)], 4, clock, FOREVER)
    assert clock.waited == [5.0, 10.0, 15.0, 20.0]  # the last wait is for the last pair


def test_drift_of_the_machine_is_not_in_the_median_difference():
    """The machine becomes slower by 20 µs a step; B is 4 µs faster."""
    clock, rng = Clock(), random.Random(0)

    def us(own):
        return own + 20 * len(clock.order) + rng.gauss(0, 0.5)

    steps = [clock.step("A", lambda: us(1000)), clock.step("B", lambda: us(996))]
    found, _ = alternated(steps, 40, clock, FOREVER)
    measured = pair_of(pairs_us=found).difference_us
    assert measured.low < -4 < measured.high
    assert measured.median == pytest.approx(-4, abs=1)
    base, variant = pair_of(pairs_us=found).medians_us
    assert base - variant == pytest.approx(4, abs=12)


def test_no_pair_starts_after_the_deadline(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pair.time, "time", lambda: clock.now)
    steps = [clock.step("A", lambda: 2.0), clock.step("B", lambda: 3.0)]
    found, _ = alternated(steps, 40, clock, 12.0)
    assert found == [[2.0, 3.0]] * 3
    assert alternated(steps, 40, clock, 0.0) == ([], [None, None])


def test_peak_of_each_variant_is_that_of_its_own_steps(monkeypatch):
    clock, peak = Clock(), [0]
    clock.on_cpu = False
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.__setitem__(0, 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0])
    needs = {"A": iter((7, 3, 3)), "B": iter((1, 2, 4))}

    def step(name):
        peak[0] = max(peak[0], next(needs[name]))

    _, peaks = alternated([lambda: step("A"), lambda: step("B")], 3, clock, FOREVER)
    assert peaks == [7, 4]


def settings_of(name=LLAMA, **changed):
    model = tiny(MODELS[name])
    given = Settings(model.shape, name, model.batch, model.length, device="cpu", warm_up=1)
    return replace(given, **changed)


def test_twin_has_the_same_parameters_in_other_modules():
    settings = settings_of("Llama 3.2 1B")  # whose embedding is the weight of the logits, too
    factory = {"device": "cpu", "dtype": torch.bfloat16}
    model = Transformer(settings.shape, settings.length, False, **factory)
    other = twin(model)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert ours is theirs
    assert other.head.output.weight is other.embedding.weight
    assert other.cos is model.cos
    assert not {*model.modules()} & {*other.modules()}


@pytest.mark.parametrize("name", MODELS)
def test_both_variants_train_the_same_weights(name):
    found = pair.measure(["eager", "patch"], asdict(settings_of(name)), 3, FOREVER)
    assert len(found["pairs_us"]) == 3
    assert all(us > 0 for times in found["pairs_us"] for us in times)
    assert found["gradient_change"] < 0.02
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-3)
    shape = tiny(MODELS[name]).shape
    norms = 2 * shape.layers * (2 if shape.qk_norm else 1) + 1
    assert found["reports"][0] == ""
    assert found["reports"][1].startswith(f"{norms} modules patched, 0 not patched")


@pytest.mark.parametrize("names", [("compile", "tilenorm-compile"), ("patch-compile", "compile")])
def test_compiled_variants_share_a_process_and_compile_once_each(graphs, names):
    found = pair.measure(names, asdict(settings_of()), 2, FOREVER)
    assert len(graphs) == 4  # of each variant a layer and the head
    ours = [any("tilenorm" in str(n.target) for n in graph.graph.nodes) for graph in graphs]
    assert ours == [name != "compile" for name in names for _ in range(2)]
    assert found["reports"][names.index("compile")] == ""
    if "tilenorm-compile" in names:
        assert found["reports"][1].count("graph 0: ") == 2  # each compiled code says it once


def test_variant_with_a_wrong_gradient_is_not_timed(monkeypatch):
    class QuarterOfTheGradient(nn.RMSNorm):
        def forward(self, x):
            return super().forward(x.detach() * 0.75 + x * 0.25)

    def patch(model):
        model.head.norm.__class__ = QuarterOfTheGradient

    monkeypatch.setattr(tilenorm, "patch", patch)
    found = pair.measure(["eager", "patch"], asdict(settings_of()), 2, FOREVER)
    assert found["status"] == "wrong" and "pairs_us" not in found
    assert found["losses"][0] == found["losses"][1]
    assert found["error"].startswith(f"the gradient of {found['gradient']} changes by ")


def test_dropout_draws_differently_and_is_not_compared(monkeypatch):
    settings = settings_of("ViT-L")
    settings = replace(settings, shape=replace(settings.shape, dropout=0.5))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    found = pair.measure(["eager", "patch"], asdict(settings), 2, FOREVER)
    assert found["gradient_change"] > pair.MOST_CHANGE
    assert len(found["pairs_us"]) == 2


def test_change_of_a_gradient_of_about_zero_is_that_of_the_mean():
    base = {"weight": torch.full((3,), 4.0), "bias": torch.tensor([0.0])}
    mean = (3 * 16 / 4) ** 0.5
    changes = changes_of(base, {"weight": torch.full((3,), 5.0), "bias": torch.tensor([0.1])})
    assert changes == pytest.approx({"weight": 0.25, "bias": 0.1 / (LEAST_SIZE * mean)})
    assert changes_of({"a": torch.zeros(2)}, {"a": torch.zeros(2)}) == {"a": 0.0}


def test_no_time_after_compiling_is_skipped():
    found = pair.measure(["eager", "eager"], asdict(settings_of()), 2, 0.0)
    assert found["status"] == "skipped" and found["pairs_us"] == []


def test_failure_of_the_profiler_does_not_lose_the_times(monkeypatch):
    def fails(step):
        raise RuntimeError("CUPTI is not there")

    monkeypatch.setattr(pair.kernels, "of_step", fails)
    assert pair.kernels_of([None, None]) == {
        "error": "no kernels: RuntimeError: CUPTI is not there"
    }
    monkeypatch.setattr(pair.kernels, "of_step", lambda step: [step])
    assert pair.kernels_of([1, 2]) == {"kernels": [[1], [2]]}


def test_options_that_this_version_lacks_are_named(monkeypatch, capsys):
    listed = {"old": Variant(patch={}, compiler="tilenorm", options={"mode": None})}
    listed["later"] = Variant(compiler="tilenorm", options={"speed": "high"})
    listed["patch-later"] = Variant(patch={"depth": 3})
    monkeypatch.setattr(variants, "VARIANTS", VARIANTS | listed)
    assert [lacking(name) for name in (*VARIANTS, "old")] == [""] * (len(VARIANTS) + 1)
    has = f"which tilenorm {tilenorm.__version__} does not have"
    assert lacking("later") == f"later needs tilenorm.compile(speed='high'), {has}"
    assert lacking("patch-later") == f"patch-later needs tilenorm.patch(depth=3), {has}"
    monkeypatch.setattr("bench.train_arguments.lacking", lambda name: f"{name} lacks something")
    with pytest.raises(SystemExit):
        train.main(["--pair", "eager", "patch"])
    assert "--pair: eager lacks something" in capsys.readouterr().err


def pair_of(**fields):
    start = {"model": "m", "label": "M", "base": "compile", "variant": "patch", "tokens": 8192}
    return train.Pair(**start | {"asked": 40} | fields)
