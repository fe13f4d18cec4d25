"""Each private name of PyTorch's is taken away in turn: the ops give the same results."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = (ROOT / "tilenorm" / "ops" / "torch_private.py").read_text()
NAMES = re.findall(r'_found\("([\w.]+)"\)', SOURCE)

# PyTorch is loaded once. For each name a process forks, in which torch_private does not find it.
WITHOUT_EACH = """
import os, sys, tempfile, traceback, types, warnings
import torch

torch.set_num_threads(1)
warnings.simplefilter("ignore")
source = open("tilenorm/ops/torch_private.py").read()


def take_away(name):
    module = types.ModuleType("tilenorm.ops.torch_private")
    exec(source.replace(f'_found("{name}")', "None"), vars(module))
    sys.modules[module.__name__] = module


def run():
    from tilenorm import layer_norm
    from tilenorm.spec import Options
    from tests.ops.helpers import FAMILY, call, step, tensors_of
    from tests.ops.pretended import pretended_gpu

    found = []
    def all_calls(names):
        for form in map(FAMILY.get, names):
            for shape in ((3, 40), (1, 2, 40)):
                tensors = tensors_of(form, *shape, dtype=torch.bfloat16)
                for _ in range(2):
                    found.extend(step(form, tensors).values())
                    found.extend(call(form, tensors))
    all_calls(FAMILY)
    x = torch.linspace(-1, 2, 120).view(3, 40).requires_grad_()
    how = (*Options(40, "layer"), 1e-6, True)
    y = torch.ops.tilenorm.norm(x, None, None, None, None, *how)[0]
    found.extend((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
    w = torch.linspace(1, 2, 40).requires_grad_()
    for asked in ([x], [w], [x, w]):  # less than what requires a gradient
        op = torch.ops.tilenorm.norm(x, None, None, w, None, *how)[0]
        for y in (op, layer_norm(x, (40,), w, eps=1e-6)):
            found.extend(torch.autograd.grad(y.square().sum(), asked))
    with pretended_gpu():
        all_calls(("layer_norm", "add_rms_norm"))
    return found


folder = tempfile.mkdtemp()
for name in ("nothing", *sys.argv[1:]):
    child = os.fork()
    if child == 0:
        try:
            take_away(name)
            torch.save(run(), f"{folder}/{name}")
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    failed = os.waitpid(child, 0)[1]
    same = not failed
    if same:
        expected, found = (torch.load(f"{folder}/{n}") for n in ("nothing", name))
        # The operator and the formula that stands for it round each in its own way.
        tolerance = {"rtol": 2**-7, "atol": 1e-3} if "rms" in name else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found, expected, **tolerance)
    print(name, "same" if same else "failed")
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What became of the ops without a name, by that name."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {k: v for k, v in os.environ.items() if k != "TILENORM_BACKEND"}
    command = [sys.executable, "-c", WITHOUT_EACH, *NAMES]
    environment |= {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert found["nothing"] == "same", done.stderr
    return {name: outcome + done.stderr for name, outcome in found.items()}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", NAMES)
def test_the_same_results_without(name, outcomes):
    assert outcomes[name].startswith("same"), outcomes[name]
