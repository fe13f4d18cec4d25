"""What Inductor's generated code calls: the implementations of the ops, past PyTorch's dispatcher.

The dispatcher and its Python layers take 13 µs of a call, more than the launch of a kernel.
"""

import ast
import hashlib
import sys
from collections.abc import Callable

# Where Inductor looks for what is to stand for an op, from PyTorch 2.11 on; else it calls the op.
REGISTRY = "torch._inductor.codegen.custom_extern_kernel_codegen"


def call_directly(op: str, bind: Callable, tensors: int) -> None:
    """Have Inductor, once it is loaded, call for an op what a module's function makes.

    bind: takes what follows the op's first `tensors` arguments, and which results are `wanted`, and
    returns a function of the tensors, that is called with tensors of one description alone: which
    there are, and their dtypes, devices and numbers of dimensions. It is called when generated code
    is loaded, or in each call where a size is among its arguments. That code is kept on the disk:
    bind has to keep its name and place.
    """
    registry, name = sys.modules.get(REGISTRY), f"torch.ops.tilenorm.{op}.default"
    if registry is None or name in registry.CUSTOM_EXTERN_KERNEL_CODEGEN:
        return

    def generate(node, writeline):
        from torch._inductor.virtualized import V

        wanted = tuple(out.get_name() not in V.graph.removed_buffers for out in node.outputs)
        given = [*node.codegen_args(), *node.codegen_kwargs(), f"wanted={wanted}"]
        bound = f"{bind.__name__}({', '.join(given[tensors:])})"
        add_once = V.graph.wrapper_code.add_import_once
        add_once(f"from {bind.__module__} import {bind.__name__}")
        if _is_constant(bound):
            there = [argument != "None" for argument in given[:tensors]]
            kinds = [(t.get_dtype(), t.get_device(), len(t.get_size())) for t in node.inputs]
            key = hashlib.sha256(repr((bound, there, kinds)).encode()).hexdigest()
            once = f"tilenorm_{op}_{key[:16]}"
            add_once(f"{once} = {bound}")
            bound = once
        writeline(f"{node.get_name()} = {bound}({', '.join(given[:tensors])})")

    registry.CUSTOM_EXTERN_KERNEL_CODEGEN[name] = registry.CustomCodegen(python=generate)


def _is_constant(call: str) -> bool:
    """Whether a call's arguments name nothing."""
    names = [node for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Name)]
    return len(names) == 1  # what is called
