"""What PyTorch sees, in rooms that import downwards alone.

    the functions, in this folder    what a user calls: checks, guards, and finding what serves
    torch_ops/                       what PyTorch's machinery sees: schemas, fakes, autograd, ...
    passes/                          what runs: implementations, allocation, launches
    pytorch/                         what the package knows of PyTorch: no room of norms

What an upper room has to tell a lower one is wired here.
"""

from ..launch import forcing
from ..table import OPS
from . import call, functional, overrides
from .passes import bound, native, registry
from .torch_ops import inductor, library, sharding

library.before_fakes().extend((inductor.tell_inductor, sharding.register_where_loaded))
overrides.public_functions().update(
    {name: getattr(functional, name) for name, op in OPS.items() if not op.quantized}
)
# What Python has prepared for repeated calls, it prepares anew for another extension, and for
# another configuration.
for _cache in (call.remembered, bound.bound_for, bound.norm_of):
    native.state().when_changed(_cache.cache_clear)
    forcing.when_changed().append(_cache.cache_clear)
forcing.when_changed().extend((registry.failures.cache_clear, native.state().forget))
