"""What Inductor's generated code calls in place of the ops: the functions under them.

That leaves out PyTorch's dispatcher, its layers in Python and the empty tensors for absent results:
25 of 63 µs of a compiled forward call, and 60 to 75 of 270 to 300 µs forward and backward. Measured
as CPU time without a GPU, where a launch did nothing.
"""

from collections.abc import Callable

from .torch_private import inductor_calls


def call_directly(op: str, function: Callable) -> None:
    """Have Inductor, once it is loaded, generate calls of a module's function for an op.

    The function takes the op's arguments, and returns None for absent results, which are empty
    tensors of the op. Generated code is kept on the disk, so the function keeps its name and place.
    """
    calls, name = inductor_calls(), f"torch.ops.tilenorm.{op}.default"
    if calls is None or name in calls.CUSTOM_EXTERN_KERNEL_CODEGEN:
        return

    def generate(node, writeline: Callable[[str], None]) -> None:
        from torch._inductor.virtualized import V

        called = function.__name__
        V.graph.wrapper_code.add_import_once(f"from {function.__module__} import {called}")
        used = [out for out in node.outputs if out.get_name() not in V.graph.removed_buffers]
        if any(list(out.get_size()) == [0] for out in used):  # an absent result is asked for
            called = name
        arguments = ", ".join([*node.codegen_args(), *node.codegen_kwargs()])
        writeline(f"{node.get_name()} = {called}({arguments})")

    calls.CUSTOM_EXTERN_KERNEL_CODEGEN[name] = calls.CustomCodegen(python=generate)
