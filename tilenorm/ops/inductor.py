"""Inductor's generated code calls functions of generated.py in place of the ops.

That leaves out PyTorch's dispatcher, its layers in Python, the empty tensors for absent results,
and finding the plan. Where an option is known only when the code runs, such as the size of rows of
any width, and where an absent result is asked for, generated code calls the op.
"""

import re
from ast import literal_eval
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

import torch

from ..table import BACKWARD, OPS
from .torch_private import inductor_calls


def tell_inductor() -> None:
    """Have Inductor, once it is loaded, generate calls of bound functions for the ops, and keep the
    code that it generates apart from that of another version. An op's fake calls this function.
    """
    _tell_generation()
    calls = inductor_calls()
    if calls is None or _name_of("norm_backward") in calls.CUSTOM_EXTERN_KERNEL_CODEGEN:
        return
    for op in (*OPS, *BACKWARD):
        custom = calls.CustomCodegen(python=partial(_generate, op))
        calls.CUSTOM_EXTERN_KERNEL_CODEGEN[_name_of(op)] = custom


def _name_of(op: str) -> str:
    return f"torch.ops.tilenorm.{op}.default"


def _generate(op: str, node, writeline: Callable[[str], None]) -> None:
    from torch._inductor.virtualized import V

    used = [out for out in node.outputs if out.get_name() not in V.graph.removed_buffers]
    arguments, line = [*node.codegen_args(), *node.codegen_kwargs()], None
    if all(list(out.get_size()) != [0] for out in used):
        line = _bound(op, node, arguments, V.graph.wrapper_code)
    line = line or f"{_name_of(op)}({', '.join(arguments)})"
    writeline(f"{node.get_name()} = {line}")


def _bound(op: str, node, arguments: list[str], wrapper) -> str | None:
    """A call of a bound function, which is made where the code is loaded, or None where not all
    options are known.
    """
    from .generated import tensors_of

    schema = getattr(torch.ops.tilenorm, op).default._schema.arguments
    given = {a.name: repr(a.default_value) for a in schema}
    positional = [a for a in arguments if "=" not in a]
    given |= zip(given, positional, strict=False)
    given |= dict(a.split("=", 1) for a in arguments[len(positional) :])
    tensors = [a.name for a in schema if "Tensor" in str(a.type)]
    options = {name: value for name, value in given.items() if name not in tensors}
    if not all(map(_is_constant, options.values())):
        return None
    taken = tensors_of(op, [name for name in tensors if given[name] != "None"])
    named = ", ".join(f"{name}={value}" for name, value in options.items())
    made = f"generated.bind({op!r}, {taken}, {named})"
    # Each kind of call has a function of its own, which finds what serves once.
    layouts = [f"{i.get_dtype()} {i.get_device()} {i.get_size()}" for i in node.inputs]
    there = [given[name] != "None" for name in taken]
    name = f"{op}_{sha256(f'{made}{layouts}{there}'.encode()).hexdigest()[:12]}"
    wrapper.add_import_once("from tilenorm.ops import generated")
    wrapper.add_import_once(f"{name} = {made}")
    return f"{name}({', '.join(given[name] for name in taken)})"


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
    package = Path(__file__).parent.parent
    files = [package / "table.py", package / "spec.py", *(package / "ops").glob("**/*.py")]
    code = b"".join(file.read_bytes() for file in sorted(files))
    return f"tilenorm-{sha256(code).hexdigest()[:16]}"
