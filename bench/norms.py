"""The modules of a package in the places of a model's norms, with the same parameters."""

from collections.abc import Callable
from importlib import import_module

from torch import nn

from bench.text import first_line

LIGER = {nn.RMSNorm: ("rms_norm", "LigerRMSNorm"), nn.LayerNorm: ("layer_norm", "LigerLayerNorm")}


def replace(model: nn.Module, package: str) -> str:
    """Replace all norms, and say how many there were."""
    count = 0
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm) in LIGER:
                made = PACKAGES[package](norm, model)
                for key, parameter in norm.named_parameters():
                    setattr(made, key, parameter)
                setattr(parent, name, made)
                count += 1
    return f"{count} norms are modules of {package}"


def absent(package: str) -> str | None:
    """Why a package cannot be imported, or None if it can be."""
    try:
        for module, _ in LIGER.values() if package == "liger" else ():
            import_module(f"liger_kernel.transformers.{module}")
    except Exception as error:  # importing a peer may raise anything
        return first_line(error)
    return None


def _of_tilenorm(norm, model: nn.Module) -> nn.Module:
    import tilenorm

    kind = getattr(tilenorm, type(norm).__name__)
    return kind(norm.normalized_shape, norm.eps, norm.elementwise_affine)


def _of_liger(norm, model) -> nn.Module:
    """As PyTorch computes it. In place, the backward would overwrite a gradient that the residual
    stream of a norm behind a part reads too.
    """
    if not norm.elementwise_affine:
        raise NotImplementedError("Liger is measured for norms with parameters only")
    module, name = LIGER[type(norm)]
    made = getattr(import_module(f"liger_kernel.transformers.{module}"), name)
    if name == "LigerLayerNorm":
        return made(norm.normalized_shape[0], norm.eps, bias=True)
    in_place = model.shape.norm_after != "part"
    return made(norm.normalized_shape[0], norm.eps, casting_mode="gemma", in_place=in_place)


PACKAGES: dict[str, Callable[..., nn.Module]] = {"tilenorm": _of_tilenorm, "liger": _of_liger}
