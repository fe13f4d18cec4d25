"""What Inductor's generated code calls: the implementations of the ops, past PyTorch's dispatcher.

The dispatcher and its Python layers take 13 µs of a call, more than the launch of a kernel.
"""

import sys

# Where Inductor looks for what is to stand for an op, from PyTorch 2.11 on; else it calls the op.
REGISTRY = "torch._inductor.codegen.custom_extern_kernel_codegen"


def call_directly(op: str, implementation: str) -> None:
    """Have Inductor, once it is loaded, call tilenorm.ops.library's function for an op.

    Generated code is kept on the disk: the function has to keep its name.
    """
    registry, name = sys.modules.get(REGISTRY), f"torch.ops.tilenorm.{op}.default"
    if registry is not None and name not in registry.CUSTOM_EXTERN_KERNEL_CODEGEN:
        generate = _Call(f"tilenorm_{op}", implementation)
        found = registry.CustomCodegen(python=generate)
        registry.CUSTOM_EXTERN_KERNEL_CODEGEN[name] = found


class _Call:
    def __init__(self, name: str, implementation: str):
        self.name = name
        self.line = f"from tilenorm.ops.library import {implementation} as {name}"

    def __call__(self, node, writeline) -> None:
        from torch._inductor.virtualized import V

        V.graph.wrapper_code.add_import_once(self.line)
        wanted = tuple(out.get_name() not in V.graph.removed_buffers for out in node.outputs)
        given = [*node.codegen_args(), *node.codegen_kwargs(), f"wanted={wanted}"]
        writeline(f"{node.get_name()} = {self.name}({', '.join(given)})")
