"""What PyTorch sees: the registry, its implementations, the torch.library ops, the functions."""

from . import generated, library, sharding

library.before_fakes().extend((generated.tell_inductor, sharding.register_where_loaded))
