import os

from bench import first_call, worker
from bench.__main__ import main
from bench.providers import Provider
from tilenorm.spec import NormSpec
from tilenorm.tools import precompile


def test_cold_and_warm_calls_run_in_two_processes_with_one_cache(monkeypatch, without_gpu, again):
    folders = []

    def run(function, timeout_s, places, **arguments):
        folders.append(os.path.dirname(places["TRITON_CACHE_DIR"]))
        return function(**arguments)

    monkeypatch.setattr(worker, "run", run)
    monkeypatch.setattr(first_call, "ROWS", 8)
    named = Provider("tilenorm", lambda op: lambda *given: op.eager(*given).detach(), on_cpu=True)
    monkeypatch.setitem(first_call.PROVIDERS, "tilenorm", named)  # its backward fails
    names = ["torch", "tilenorm", "quack"]
    options = ["--hidden", "16", "--dtype", "float32", "--provider", *names]
    found, out, _ = again(["first-call", *options])
    assert len(folders) == 4 and len(set(folders)) == 2
    assert "absent: quack (needs a GPU)" in out
    assert [(line.provider, line.n, line.direction) for line in found.first_calls] == [
        (name, n, way) for name in names[:2] for n in (512, 16) for way in ("forward", "backward")
    ]
    for line in found.first_calls:
        if line.provider == "tilenorm" and line.direction == "backward":
            assert line.error == "NotImplementedError: has a forward only" and not line.cold_s
        else:
            assert line.cold_s > 0 and line.warm_s > 0


def test_failed_process_is_one_line(monkeypatch, without_gpu, capsys):
    def run(*arguments, **options):
        raise worker.WorkerError("not done after 1 s")

    monkeypatch.setattr(worker, "run", run)
    for limit, lines in (("60", 1), ("-1", 0)):
        main(["first-call", "--provider", "torch", "--max-seconds", limit])
        assert capsys.readouterr().out.count("torch: not done after 1 s") == lines


def test_precompile_compiles_the_specs_that_are_called(monkeypatch):
    specs = []
    monkeypatch.setattr(worker, "run", lambda function, timeout_s, argv: function(argv))
    monkeypatch.setattr(
        precompile, "precompile", lambda all, *rest: specs.extend(all) or [[] for _ in all]
    )
    found = first_call.precompile("add_layer_norm", [64, 128], ["float32"], "sm_90")
    assert found.seconds > 0
    parameters = {"weight": "float32", "bias": "float32"}
    assert specs == [NormSpec.of("add_layer_norm", n, "float32", **parameters) for n in (64, 128)]
