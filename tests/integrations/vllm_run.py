"""Runs vLLM's engine on a CPU: python -m tests.integrations.vllm_run MODEL FILE OPTION...

FILE then holds what the engine's norms saw and gave, and how often tilenorm ran. With --compile the
model is compiled, and its norms are not looked into. With --processes 2 two workers share it.
"""

import argparse
import os

# Before vLLM is imported. One process, unless workers share the model.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}

import torch
from torch import Tensor, nn

from .counted import counting

LENGTHS, NEW_TOKENS = (5, 17, 33), 6


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 512, (n,), generator=generator).tolist() for n in LENGTHS]


def start_counting(model: nn.Module) -> None:
    """In a worker."""
    model.counter = counting()
    model.counts = model.counter.__enter__()


def counts_of(model: nn.Module) -> dict:
    from tilenorm.integrations import vllm

    return dict(model.counts) | {"report": vllm.report(model)}


def record(model: nn.Module, seen: list) -> None:
    """Keep what each norm takes and gives. An engine's own norms write into what they take."""

    def before(module, inputs):
        module.taken = tuple(t.clone() for t in inputs)
        return tuple(t.clone() for t in inputs)

    def keep(name):
        def after(module, inputs, output):
            outputs = output if isinstance(output, tuple) else (output,)
            seen.append((name, module.taken, tuple(t.clone() for t in outputs)))

        return after

    for name, module in model.named_modules():
        if type(module).__name__.startswith("Tile"):
            module.register_forward_pre_hook(before)
            module.register_forward_hook(keep(name))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("file")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args()
    several = asked.processes > 1
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(several))
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        asked.model,
        skip_tokenizer_init=True,
        enforce_eager=not asked.compile,
        dtype="bfloat16",
        max_model_len=128,
        tensor_parallel_size=asked.processes,
        distributed_executor_backend="mp" if several else None,
        enable_prefix_caching=False,
    )
    seen: list[tuple[str, tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    llm.apply_model(start_counting)
    if not (asked.compile or several):
        llm.apply_model(lambda model: record(model, seen))
    how = {"temperature": 0, "max_tokens": NEW_TOKENS, "detokenize": False, "ignore_eos": True}
    tokens = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts()]
    llm.generate(tokens, SamplingParams(**how), use_tqdm=False)
    torch.save({"seen": seen, "workers": llm.apply_model(counts_of)}, asked.file)


if __name__ == "__main__":
    main()
