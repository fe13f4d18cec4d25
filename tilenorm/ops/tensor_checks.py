"""Checks of one argument that a caller passes, and the names of what is passed in its place."""

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def wrong(
    op: str, name: str, takes: str, got: object, kind: type[Exception] = RuntimeError
) -> Exception:
    """The exception for an argument that is not what an op takes."""
    return kind(f"{op}: argument {name!r} takes {takes}, got {got}")


def check_argument(caller: str, name: str, value: object, right: bool, takes: str) -> None:
    """Raise TypeError unless an argument is right: of a type that the caller takes."""
    if not right:
        raise wrong(caller, name, takes, kind_of(value), TypeError)


def check_tensor(op: str, name: str, value: object, takes: str = "a Tensor") -> None:
    check_argument(op, name, value, isinstance(value, Tensor), takes)


def check_device(op: str, name: str, tensor: Tensor, input: Tensor) -> None:
    if tensor.device != input.device:
        raise wrong(op, name, f"the input's device {input.device}", tensor.device)


def check_dtype(op: str, name: str, tensor: Tensor) -> None:
    """Check a tensor's layout and dtype."""
    if tensor.layout != torch.strided:
        takes = "the layout torch.strided"
        raise wrong(op, name, takes, tensor.layout, NotImplementedError)
    if tensor.dtype not in DTYPES:
        takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise wrong(op, name, takes, tensor.dtype, NotImplementedError)


def kind_of(value: object) -> str:
    return type(value).__name__
