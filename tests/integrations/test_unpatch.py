"""tilenorm.unpatch: copies, what other libraries make of a patched model, and refusals."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

import tilenorm
from tests.support.calls import random, through_save
from tilenorm.integrations.patch.classes import PatchedModule

from .norms import Custom, N
from .test_replaced import runs_tilenorm

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Block(nn.Module):
    """A linear layer, and a sum right before the first of two norms."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.last = nn.Linear(N, N), Custom(), nn.LayerNorm(N)

    def forward(self, x):
        x = self.linear(x) + x
        x = self.norm(x)
        return self.last(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(N, N)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data.copy_(random(*parameter.shape, seed=seed))

    def forward(self, x):
        return self.head(self.block(x))


def with_lora(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["linear"], modules_to_save=["norm", "last"])
    return peft.get_peft_model(model, config)


def offloaded(model):
    return pytest.importorskip("accelerate").cpu_offload(model, torch.device("cpu"))


def without_hooks(model):
    offloaded(model)
    return pytest.importorskip("accelerate").hooks.remove_hook_from_module(model, recurse=True)


def with_hooks_of_diffusers(model):
    hooks = pytest.importorskip("diffusers.hooks")
    for module in (model.block, model.block.norm, model.block.last):
        registry = hooks.HookRegistry.check_if_exists_or_initialize(module)
        registry.register_hook(hooks.ModelHook(), "one")
        registry.register_hook(hooks.ModelHook(), "two")
    return model


def parametrized(model):
    parametrize.register_parametrization(model.block.last, "weight", nn.Identity())
    return model


def sharded(model):
    for module in (model.block.norm, model.block, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    return model


def sharded_1(model):
    model.block = FullyShardedDataParallel(model.block, device_id=torch.device("cpu"))
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


# What makes another model of a model, and when. FSDP1 takes the parameters from the norms: patch
# would leave those.
WRAPPERS = {
    with_lora: ["patch wrap copy", "wrap patch copy"],
    offloaded: ["wrap patch copy"],
    without_hooks: ["patch wrap copy"],
    parametrized: ["wrap patch copy"],
    partial(torch.compile, backend="eager"): ["patch wrap copy"],
    # deepcopy keeps functions: the hooks in a copy call the original, also without us.
    with_hooks_of_diffusers: ["patch wrap", "wrap patch"],
    sharded: ["wrap patch"],
    DistributedDataParallel: ["patch wrap"],
    sharded_1: ["patch wrap"],
    AveragedModel: ["patch wrap"],
    copy.copy: ["patch wrap"],
    through_save: ["patch wrap"],
}


def classes(model) -> list:
    """The classes of a model's modules, by the names of all their bases."""
    return [[base.__qualname__ for base in type(m).__mro__] for m in model.modules()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap, order",
    [(wrap, order) for wrap, orders in WRAPPERS.items() for order in orders],
    ids=lambda value: getattr(value, "__name__", str(value)[:20]),
)
def test_what_libraries_make_of_a_patched_model(wrap, order, dynamo, one_process_mesh):
    """After these steps and unpatch, a model is what it is after the same steps without patch. It
    can be patched again.
    """
    steps = {"wrap": wrap, "copy": copy.deepcopy, "patch": lambda model: model}
    model, other = Model(), Model()
    for step in order.split():
        other = steps[step](other)
        if step == "patch":
            assert len(tilenorm.patch(model, residual=True).patched) >= 2
        model = steps[step](model)
    expected = other(random(5, N))
    called, y = runs_tilenorm(model)
    torch.testing.assert_close(y, expected)
    assert called
    with pytest.raises(RuntimeError, match=r"is already patched; tilenorm.unpatch\(model\)"):
        tilenorm.patch(model)
    names = tilenorm.unpatch(model)
    assert len(names) >= 2 and {*names} <= dict(model.named_modules()).keys()
    assert classes(model) == classes(other)
    assert not any(isinstance(module, PatchedModule) for module in model.modules())
    called, y = runs_tilenorm(model)
    assert not called and torch.equal(y, expected) and not tilenorm.unpatch(model)
    if wrap is not sharded_1:
        assert tilenorm.patch(model, residual=True).patched and runs_tilenorm(model)[0]


def test_a_copy_whose_hooks_call_the_original():
    model = with_hooks_of_diffusers(Model())
    tilenorm.patch(model, residual=True)
    other = copy.deepcopy(model)
    assert len(tilenorm.unpatch(other)) == 3 and runs_tilenorm(other)[0]
    assert len(tilenorm.unpatch(model)) == 3
    assert not runs_tilenorm(other)[0] and torch.equal(other(random(5, N)), Model()(random(5, N)))


def test_undo_leaves_copies_and_reverts_what_is_still_patched():
    model = Model()
    report = tilenorm.patch(model, residual=True)
    other, third = copy.deepcopy(model), copy.deepcopy(model)
    assert len(tilenorm.unpatch(other)) == 3 and runs_tilenorm(model)[0]
    assert tilenorm.unpatch(model.block.norm) == ("the model",)
    report.undo()
    assert classes(model) == classes(Model()) and runs_tilenorm(third)[0]
    report = tilenorm.patch(model)
    assert tilenorm.unpatch(model) == ("block.norm", "block.last")
    with pytest.raises(RuntimeError, match="undo: this patch has already been undone"):
        report.undo()


@pytest.mark.parametrize("revert", ["undo", "unpatch"])
def test_a_module_that_cannot_be_reverted_is_named_and_nothing_changes(revert):
    model = Model()
    report = tilenorm.patch(model, residual=True)

    class Derived(type(model.block.last)):
        def forward(self, x):
            return super().forward(x) + 1

    model.block.last.__class__ = Derived
    before, (_, y) = [type(m) for m in model.modules()], runs_tilenorm(model)
    with pytest.raises(RuntimeError, match=rf"{revert}: block.last .*Derived.* super\(\) in forw"):
        report.undo() if revert == "undo" else tilenorm.unpatch(model)
    assert [type(m) for m in model.modules()] == before
    called, again = runs_tilenorm(model)
    assert called and torch.equal(again, y)


def test_a_derived_class_that_names_its_base():
    module = nn.LayerNorm(N)
    expected = module(random(5, N)) + 1
    tilenorm.patch(module)
    base = type(module)
    module.__class__ = type("Derived", (base,), {"forward": lambda m, x: base.forward(m, x) + 1})
    tilenorm.unpatch(module)
    assert type(module).__bases__ == (nn.LayerNorm,)
    assert torch.equal(module(random(5, N)), expected)
