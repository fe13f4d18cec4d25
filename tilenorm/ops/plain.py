"""Whether eager PyTorch alone sees what is done to tensors: no mode, transform or subclass."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_Transform = torch._C._functorch.CInterpreter
_PLAIN = frozenset((Tensor, Parameter, type(None)))


def is_transformed() -> bool:
    """Whether torch.func or forward-mode derivatives want to see single operations."""
    # A compiler takes `is not None` for true here.
    return isinstance(_transforms(), _Transform) or forward_ad._current_level >= 0


def is_plain(*tensors: Tensor | None) -> bool:
    return not modes() and not is_transformed() and _PLAIN.issuperset(map(type, tensors))
