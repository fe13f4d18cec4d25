"""Runs torchtitan's trainer on the CPU: python -m tests.integrations.titan_run FOLDER OPTION...

It prints a line of JSON: the losses, the classes of the norms, and how often tilenorm ran.

torch.cpu stands for the device module, with the functions that it lacks; a tokenizer and a text are
made here; and scaled_dot_product_attention stands for FlexAttention, which has no backward pass on
a CPU. All else is torchtitan's own.
"""

import json
import sys
from collections import Counter, defaultdict, namedtuple
from pathlib import Path
from types import SimpleNamespace

import torch

from .counted import counting

STEPS = 4
PROPERTIES = SimpleNamespace(total_memory=2**34, multi_processor_count=1)
LACKING = {
    "get_device_name": lambda *_: "CPU",
    "get_device_properties": lambda *_: PROPERTIES,
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda *_: defaultdict(int),
    "current_device": lambda: 0,
    "set_device": lambda *_: None,
    "max_memory_allocated": lambda *_: 0,
    "memory_allocated": lambda *_: 0,
    "memory_reserved": lambda *_: 0,
}


def on_cpu() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    for name, function in LACKING.items():
        setattr(torch.cpu, name, function)
    if not hasattr(torch.distributed, "set_timeout"):  # newer than some PyTorch that tests run
        torch.distributed.set_timeout = lambda *_: None
    from torchtitan.models.common.attention import FlexAttention

    auxiliary = namedtuple("Auxiliary", "lse")(None)

    def attend(q, k, v, *, scale, enable_gqa, **_):
        how = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **how), auxiliary

    FlexAttention.compiled_flex_attn = staticmethod(attend)


def write_assets(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    text = [f"the norm of row {i} is {i * i % 97} and its weight is {i % 13}" for i in range(4000)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "data").mkdir(exist_ok=True)
    line = json.dumps({"text": " ".join(text)})
    (folder / "data" / "c4.json").write_text("\n".join([line] * 8))


def train(folder: Path, options: list[str]) -> tuple[list[float], Counter]:
    """The losses of the steps, and the classes of the model's norms."""
    from torchtitan.config import ConfigManager

    fixed = {
        "--hf_assets_path": folder,
        "--dataloader.dataset_path": folder / "data",
        "--training.steps": STEPS,
        "--training.seq_len": 128,
        "--training.local_batch_size": 2,
        "--debug.seed": 3,
        "--dump_folder": folder / "out",
    }
    arguments = [str(word) for pair in fixed.items() for word in pair]
    arguments += ["--training.disable_cuda_graphs", *options]
    config = ConfigManager().parse_args(arguments)
    config.validator.enable = False
    config.checkpoint.enable = False
    trainer = config.build()
    losses, step = [], trainer.forward_backward_step

    def recorded(*args, **kwargs):
        loss = step(*args, **kwargs)
        losses.append(float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss))
        return loss

    trainer.forward_backward_step = recorded
    trainer.train()
    [model] = trainer.model_parts
    norms = Counter(type(m).__name__ for m in model.modules() if "Norm" in type(m).__name__)
    trainer.close()
    return losses, norms


def main() -> None:
    folder, *options = sys.argv[1:]
    on_cpu()
    folder = Path(folder)
    if not (folder / "tokenizer.json").exists():
        write_assets(folder)
    with counting() as counts:
        losses, norms = train(folder, options)
    print(json.dumps({"losses": losses, "norms": norms, "ran": counts}))


if __name__ == "__main__":
    main()
