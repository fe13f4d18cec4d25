"""Who sees what is done to tensors: autograd, a mode, a transform or subclass, or PyTorch alone."""

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


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd is to record it."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether neither a mode nor a transform nor a subclass wants to see it."""
    return not modes() and not is_transformed() and _PLAIN.issuperset(map(type, tensors))
