"""patch on models of other packages: outputs and gradients, what is left, and undo.

`pip install -e ".[clients]"` installs the packages. A test is skipped where its package is absent.
"""

import time
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import tilenorm

from . import clients
from .clients import CLIENTS
from .graphs import trained

pytestmark = [pytest.mark.slow, pytest.mark.any_torch]


def package(name: str):
    """A module of a package, or skips the test."""
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed: it belongs to the extra `clients`")
    return clients.imported(name)


def client(name: str):
    package(CLIENTS[name].module)
    return CLIENTS[name]


@pytest.mark.parametrize("name", CLIENTS)
def test_what_is_patched(name):
    """And the page of clients says so."""
    build = client(name)
    norms, blocks, left = clients.patched(clients.built(build)[0])[1]
    assert (norms, blocks, bool(left)) == (build.norms, build.blocks, bool(build.left)), left
    assert all(build.left in entry.reason for entry in left)
    cells = clients.row(name, build).partition(" | ")[2]
    assert f" | {cells}" in clients.FILE.read_text()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", [n for n, c in CLIENTS.items() if c.package != "torchtitan"])
def test_a_patched_model_computes_the_same(name, residual):
    model, x = clients.built(client(name))
    expected = trained(model, x)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    report = tilenorm.patch(model, residual=residual)
    for got, want in zip(trained(model, x), expected, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            size = max(1.0, want.abs().max().item())
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * size)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    if report.patched:
        report.undo()
    for got, want in zip(trained(model, x), expected, strict=True):
        assert got is want is None or torch.equal(got, want)


def test_x_transformers_compiled(dynamo):
    model, x = clients.built(client("Encoder(use_rmsnorm=True)"))
    expected = model(x)
    compiled = tilenorm.compile(model, backend="aot_eager", inexact=True)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    assert len(compiled.tilenorm_report.replaced) == 5


def test_lightning_trains_a_patched_model(tmp_path):
    module = package("lightning")

    class Task(module.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1))

        def training_step(self, batch, _):
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    tasks = [Task(), Task()]
    tasks[1].load_state_dict(tasks[0].state_dict())
    assert len(tilenorm.patch(tasks[1], residual=True).patched) == 1
    data = torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4)
    for task in tasks:
        trainer = module.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, detect_anomaly=True,
            enable_checkpointing=False, enable_progress_bar=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(task, data)
    for got, want in zip(*(task.parameters() for task in tasks), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [n for n, c in CLIENTS.items() if c.package == "torchtitan"])
def test_8_billion_parameters_are_patched_in_3_seconds(name):
    model, _ = clients.built(client(name))
    tilenorm.patch(nn.LayerNorm(8))  # what is imported or compiled once counts for no model
    before = time.process_time()
    tilenorm.patch(model, residual=True)
    assert time.process_time() - before < 3
