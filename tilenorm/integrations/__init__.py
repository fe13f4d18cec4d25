"""tilenorm in existing models, in inference engines and in trainers.

A module of these is imported when it is first asked for, as tilenorm.integrations.fx for one. That
for torchtitan is imported by its name alone, because it needs torchtitan.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # __getattr__ imports these
    from . import aten, compile, fx, hf_kernels, megatron, patch, sglang, vllm

__all__ = ["aten", "compile", "fx", "hf_kernels", "megatron", "patch", "sglang", "vllm"]


if not TYPE_CHECKING:  # a type checker would then take every name for one that is there

    def __getattr__(name: str) -> Any:
        """A module that is not imported yet. Python calls this for such names alone."""
        if name in __all__:
            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
