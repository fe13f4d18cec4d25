"""DTensors among other tensors: torch.distributed is never imported for the question."""

import sys
from typing import Any


def is_distributed(value: object) -> bool:
    """Whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def added_up(gradient: Any, like: Any) -> Any:
    """A Partial DTensor, added up and placed as another DTensor is; any other tensor as it is."""
    if any(p.is_partial() for p in getattr(gradient, "placements", ())):
        return gradient.redistribute(placements=like.placements)
    return gradient
