"""What PyTorch sees: the registry, its implementations, the torch.library ops, the functions."""

from . import bound, call, generated, library, native, sharding

library.before_fakes().extend((generated.tell_inductor, sharding.register_where_loaded))
# What Python has prepared for repeated calls, it prepares anew for another extension.
for _cache in (call.remembered, bound.bound_for, bound.norm_of):
    native.state().when_changed(_cache.cache_clear)
