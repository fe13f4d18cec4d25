"""What Inductor's generated code calls in place of the ops: functions of bound.py.

That leaves out PyTorch's dispatcher, its layers in Python, the empty tensors for absent results,
and finding the plan. Where an option is known only when the code runs, such as the size of rows of
any width, and where an absent result is asked for, generated code calls the op.
"""

import re
from ast import literal_eval
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

from .schemas import first_and_others, tensor_names
from .torch_private import inductor_calls


def tell_inductor(op: str) -> None:
    """Have Inductor, once it is loaded, generate calls of bound functions for an op, and keep the
    code that it generates apart from that of another version. An op's fake calls this function.
    """
    _tell_generation()
    calls, name = inductor_calls(), f"torch.ops.tilenorm.{op}.default"
    if calls is None or name in calls.CUSTOM_EXTERN_KERNEL_CODEGEN:
        return

    def generate(node, writeline: Callable[[str], None]) -> None:
        from torch._inductor.virtualized import V

        used = [out for out in node.outputs if out.get_name() not in V.graph.removed_buffers]
        arguments, line = [*node.codegen_args(), *node.codegen_kwargs()], None
        if all(list(out.get_size()) != [0] for out in used):
            line = _bound(op, node, arguments, V.graph.wrapper_code)
        line = line or f"{name}({', '.join(arguments)})"
        writeline(f"{node.get_name()} = {line}")

    calls.CUSTOM_EXTERN_KERNEL_CODEGEN[name] = calls.CustomCodegen(python=generate)


def _bound(op: str, node, arguments: list[str], wrapper) -> str | None:
    """A call of a bound function, which is made where the code is loaded, or None where not all
    options are known.
    """
    schema = getattr(torch.ops.tilenorm, op).default._schema.arguments
    given = {a.name: repr(a.default_value) for a in schema}
    positional = [a for a in arguments if "=" not in a]
    given |= zip(given, positional, strict=False)
    given |= dict(a.split("=", 1) for a in arguments[len(positional) :])
    tensors = tensor_names(op)
    options = {name: value for name, value in given.items() if name not in tensors}
    if not all(map(_is_constant, options.values())):
        return None
    taken, others = first_and_others(op, [n for n in tensors if given[n] != "None"])
    made = f"bound.{op}({', '.join(f'{n}={v}' for n, v in options.items())}, others={others})"
    # Each kind of call has a function of its own, which finds what serves once.
    layouts = [f"{i.get_dtype()} {i.get_device()} {i.get_size()}" for i in node.inputs]
    there = [given[name] != "None" for name in (*taken, *others)]
    name = f"{op}_{sha256(f'{made}{layouts}{there}'.encode()).hexdigest()[:12]}"
    wrapper.add_import_once("from tilenorm.ops import bound")
    wrapper.add_import_once(f"{name} = {made}")
    return f"{name}({', '.join(given[n] for n in (*taken, *others))})"


def _is_constant(value: str) -> bool:
    """Whether generated code has a value of its own for an option, and no name of a symbol."""
    try:
        literal_eval(value)
    except (ValueError, SyntaxError):
        return re.fullmatch(r"torch\.\w+", value) is not None  # a dtype
    return True


def _tell_generation() -> None:
    """Put a digest of this package's ops into the key of torch.compile's caches on the disk.

    Generated code calls functions of the ops, which another version may not have. The key that a
    process computes after this call differs from that of another version.
    """
    tag = _generation()
    config = torch.compiler.config
    if tag not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag}{tag}"


@cache
def _generation() -> str:
    files = sorted(Path(__file__).parent.glob("**/*.py"))
    return f"tilenorm-{sha256(b''.join(file.read_bytes() for file in files)).hexdigest()[:16]}"
