"""tilenorm's norms in layer specs of Megatron-Core. Tested with 0.16.

    spec = with_tilenorm(get_gpt_layer_local_spec(normalization="RMSNorm"))
    model = GPTModel(config, spec, ...)

A spec may also name `Norm` itself: TransformerLayerSubmodules(input_layernorm=Norm, …).
"""

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from ..nn import LayerNorm, RMSNorm

Spec = TypeVar("Spec")
# Megatron's own, by name, so that this module needs none of the libraries behind them.
REPLACED = ("WrappedTorchNorm", "FusedLayerNorm", "TENorm")


class Norm:
    """Makes a norm of a layer spec: tilenorm's RMSNorm or LayerNorm, as the configuration says.

    It honours `layernorm_zero_centered_gamma`, whose weights are stored around zero, and
    `sequence_parallel`, for which Megatron adds up the gradients of marked parameters.

    Args: those of Megatron's WrappedTorchNorm, of which the last three are not read, as there.

    Raises: ValueError where config.normalization is neither "RMSNorm" nor "LayerNorm", and for
    `memory_efficient_layer_norm`, which saves the output in the place of the input.
    """

    rounding = "late"

    def __new__(  # type: ignore[misc]
        cls,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> nn.Module:
        kinds = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
        if config.normalization not in kinds:
            takes = " or ".join(kinds)
            raise ValueError(
                f"Norm: config.normalization takes {takes}, got {config.normalization}"
            )
        if config.memory_efficient_layer_norm:
            raise ValueError("Norm: config.memory_efficient_layer_norm is not served")
        offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        options = {"offset": offset, "rounding": cls.rounding}
        norm = kinds[config.normalization](hidden_size, eps, **options)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class EarlyNorm(Norm):
    """As Norm, with the rounding of Hugging Face's LlamaRMSNorm, for weights that are to give the
    bits of a rollout which rounds so.
    """

    rounding = "early"


def with_tilenorm(spec: Spec, rounding: str = "late") -> Spec:
    """A spec of a layer or a block, with tilenorm's norms in the place of Megatron's.

    Norms that Transformer Engine computes inside of a linear layer stay, and so does L2Norm.

    Args:
        spec: a ModuleSpec or the submodules of one. It is not changed.
        rounding: "late" or "early" (see tilenorm.rms_norm).

    Raises: ValueError for another rounding, and where the spec has no norm to replace.
    """
    kinds = {"late": Norm, "early": EarlyNorm}
    if rounding not in kinds:
        raise ValueError(f"with_tilenorm: rounding takes 'late' or 'early', got {rounding!r}")
    replaced = _replaced(spec, kinds[rounding])
    if replaced is spec:
        takes = ", ".join(REPLACED)
        raise ValueError(f"with_tilenorm: the spec has none of Megatron's norms ({takes})")
    return replaced


def _replaced(value: Any, norm: type[Norm]) -> Any:
    """A part of a spec with the norms replaced; the part itself where there is none."""
    if isinstance(value, type):
        return norm if value.__name__ in REPLACED else value
    if isinstance(value, partial):
        kept = {name: _replaced(part, norm) for name, part in value.keywords.items()}
        same = all(kept[name] is part for name, part in value.keywords.items())
        return value if same else partial(value.func, *value.args, **kept)
    if isinstance(value, list | tuple):
        parts = type(value)(_replaced(part, norm) for part in value)
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
    if not is_dataclass(value):
        return value
    changed = {}
    for field in fields(value):
        part = getattr(value, field.name)
        new = _replaced(part, norm)
        if new is not part:
            changed[field.name] = new
    return replace(value, **changed) if changed else value
