"""Checks of one tensor that a caller passes, and the names of what is passed in its place."""

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(op: str, name: str, value: object, takes: str = "a Tensor") -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: argument {name!r} takes {takes}, got {kind_of(value)}")


def check_device(op: str, name: str, tensor: Tensor, input: Tensor) -> None:
    if tensor.device != input.device:
        raise RuntimeError(
            f"{op}: argument {name!r} takes the input's device {input.device}, got {tensor.device}"
        )


def check_dtype(op: str, name: str, tensor: Tensor) -> None:
    """Check a tensor's layout and dtype."""
    if tensor.layout != torch.strided:
        raise NotImplementedError(
            f"{op}: argument {name!r} takes the layout torch.strided, got {tensor.layout}"
        )
    if tensor.dtype not in DTYPES:
        takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise NotImplementedError(f"{op}: argument {name!r} takes {takes}, got {tensor.dtype}")


def kind_of(value: object) -> str:
    return type(value).__name__
