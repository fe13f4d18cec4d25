"""patch on models of other packages: outputs and gradients, what is left, and undo.

`pip install -e ".[clients]"` installs the packages. A test is skipped where its package is absent.
"""

import time
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import tilenorm

pytestmark = [pytest.mark.slow, pytest.mark.any_torch]


@pytest.fixture(scope="module", autouse=True)
def torchvision_operators():
    """PyPI's torchvision is built for CUDA. Beside a PyTorch for CPUs it registers no operators.
    timm imports it, and its import looks for these two.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms") if find_spec("torchvision") and not torch.version.cuda else ():
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")
    yield
    library._destroy()


def package(name: str):
    """A package, or skips the test."""
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed: it belongs to the extra `clients`")
    return import_module(name)


def vit(timm):
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return timm.models.VisionTransformer(**sizes), torch.randn(2, 3, 32, 32)


def convnext(timm):
    return timm.models.ConvNeXt(depths=(1, 1, 1, 1), dims=(16, 24, 32, 40)), torch.randn(
        2, 3, 64, 64
    )


def clip(open_clip):
    vision = {"image_size": 32, "patch_size": 16, "width": 64, "layers": 2, "head_width": 32}
    text = {"context_length": 8, "vocab_size": 50, "width": 64, "heads": 2, "layers": 2}
    model = open_clip.CLIP(32, vision, text)
    tokens = torch.randint(1, 50, (2, 8))
    return Features(model, tokens), torch.randn(2, 3, 32, 32)


class Features(nn.Module):
    def __init__(self, model, tokens):
        super().__init__()
        self.model, self.tokens = model, tokens

    def forward(self, images):
        return self.model.encode_image(images) @ self.model.encode_text(self.tokens).T


def encoder(x_transformers, **options):
    return x_transformers.Encoder(dim=32, depth=2, heads=2, **options), torch.randn(2, 5, 32)


# Of each model: its package, how many modules are patched at least, and how many are left.
MODELS = {
    "timm's ViT": ("timm", vit, 5, 0),
    "timm's ConvNeXt": ("timm", convnext, 9, 0),
    "open_clip": ("open_clip", clip, 10, 0),
    "x-transformers' LayerNorm": ("x_transformers", encoder, 5, 0),
    "x-transformers' RMSNorm": ("x_transformers", partial(encoder, use_rmsnorm=True), 0, 5),
}


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = model(x)
    torch.manual_seed(1)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    return [y, *torch.autograd.grad(y, leaves, torch.randn_like(y), allow_unused=True)]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_model_is_patched_and_computes_the_same(name, residual):
    client, build, patched, left = MODELS[name]
    module = package(client)
    torch.manual_seed(0)
    model, x = build(module)
    model.eval()
    expected, state = step(model, x), {k: v.clone() for k, v in model.state_dict().items()}
    report = tilenorm.patch(model, residual=residual)
    names = {name or "the model": module for name, module in model.named_modules()}
    norms = [
        entry
        for entry in report.left
        if "norm" in entry.cls.__name__.lower() and not [*names[entry.name].children()]
    ]
    assert len(report.patched) >= patched and len(norms) == left, report
    assert all("F.normalize" in entry.reason for entry in norms)
    for got, want in zip(step(model, x), expected, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            size = max(1.0, want.abs().max().item())
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * size)
    assert model.state_dict().keys() == state.keys()
    if report.patched:
        report.undo()
    for got, want in zip(step(model, x), expected, strict=True):
        assert got is want is None or torch.equal(got, want)


def test_x_transformers_compiled(dynamo):
    module = package("x_transformers")
    model, x = encoder(module, use_rmsnorm=True)
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


@pytest.mark.parametrize("family, per_layer", [("llama3", 2), ("qwen3", 4)])
def test_torchtitan_is_patched_in_3_seconds(family, per_layer):
    """The models of 8 billion parameters, on the meta device."""
    module = package(f"torchtitan.models.{family}")
    config = getattr(module, f"{family}_configs")["8B"](attn_backend="flex")
    with torch.device("meta"):
        model = config.build()
    tilenorm.patch(nn.LayerNorm(8))  # what is imported or compiled once counts for no model
    before = time.process_time()
    report = tilenorm.patch(model, residual=True)
    elapsed = time.process_time() - before
    norms = sum(isinstance(child, nn.RMSNorm) for child in model.modules())
    layers = len(model.layers)
    assert norms == layers * per_layer + 1
    assert sum(issubclass(entry.cls, nn.RMSNorm) for entry in report.patched) == norms
    assert len(report.patched) == norms + layers, report  # and the blocks, for their sums
    assert elapsed < 3, elapsed
