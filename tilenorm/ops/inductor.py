"""What Inductor's generated code calls: the implementations of the ops, past PyTorch's dispatcher.

The dispatcher and its Python layers take 13 µs of a call, more than the launch of a kernel.
"""

import sys
from collections.abc import Callable

# Where Inductor looks for what is to stand for an op, from PyTorch 2.11 on; else it calls the op.
REGISTRY = "torch._inductor.codegen.custom_extern_kernel_codegen"


def call_directly(op: str, implementation: Callable) -> None:
    """Have Inductor, once it is loaded, call a module's function for an op.

    Generated code is kept on the disk: the function has to keep its name and place.
    """
    registry, name = sys.modules.get(REGISTRY), f"torch.ops.tilenorm.{op}.default"
    if registry is None or name in registry.CUSTOM_EXTERN_KERNEL_CODEGEN:
        return
    called = f"tilenorm_{op}"
    line = f"from {implementation.__module__} import {implementation.__name__} as {called}"

    def generate(node, writeline):
        from torch._inductor.virtualized import V

        V.graph.wrapper_code.add_import_once(line)
        wanted = tuple(out.get_name() not in V.graph.removed_buffers for out in node.outputs)
        given = [*node.codegen_args(), *node.codegen_kwargs(), f"wanted={wanted}"]
        writeline(f"{node.get_name()} = {called}({', '.join(given)})")

    registry.CUSTOM_EXTERN_KERNEL_CODEGEN[name] = registry.CustomCodegen(python=generate)
