"""What Inductor's generated code calls in place of the ops: functions in which everything constant
of a call is bound. Inductor is told here to generate the calls.

They leave out PyTorch's dispatcher, its layers in Python, the empty tensors for absent results, and
finding the plan. Generated code makes one function for each kind of call when it is loaded: of one
op, of tensors with the same dtypes, device and parameters, with the same options. The function
finds what serves when it is called first, because code is loaded before a device is used. Then a
call checks that its tensors are plain, and runs the implementation. Arguments that only the
dispatcher can serve go to the op. Where an option is known only when the code runs, such as the
size of rows of any width, and where an absent result is asked for, generated code calls the op.

Calls that repeat earlier ones ask only whether a mode sees them. TorchDynamo's guards hold the
dispatch keys of a graph's inputs, and what Inductor makes is plain. A step of a model runs much
between two calls, so that each Python object that a call touches comes from memory: on the host of
an H100 a forward pass of 5 µs in a loop took 40 µs in a step of BERT.
"""

import re
from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...table import BACKWARD, OPS, TERMS
from ..passes import dims
from ..passes.base import NONE, Pass
from ..passes.bound import Bound, bound_of, norm_of
from ..passes.reading import MOST_SHAPES, contiguous_strides_of, vector_of
from ..passes.reference import STATISTICS
from ..passes.registry import MAX_ROWS, on_device_of
from ..pytorch.plain import Plain
from ..pytorch.torch_private import inductor_calls, modes, reinterpret
from .internal_ops import KINDS
from .telling import Generated


def tell_inductor() -> None:
    """Have Inductor, once it is loaded, generate calls of bound functions for the ops.

    A digest of this package's ops goes into the key of torch.compile's caches on the disk, because
    another version may not have the functions that generated code calls. The key that a process
    computes after this call differs from that of another version.
    """
    config, tag = torch.compiler.config, _generation()
    if tag not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag}{tag}"
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
    schema = getattr(torch.ops.tilenorm, op).default._schema.arguments
    values = {a.name: repr(a.default_value) for a in schema}
    positional = [a for a in arguments if "=" not in a]
    values |= zip(values, positional, strict=False)
    values |= dict(a.split("=", 1) for a in arguments[len(positional) :])
    tensors = [a.name for a in schema if "Tensor" in str(a.type)]
    options = {name: value for name, value in values.items() if name not in tensors}
    if not all(map(_is_constant, options.values())):
        return None
    taken = tensors_of(op, [name for name in tensors if values[name] != "None"])
    named = ", ".join(f"{name}={value}" for name, value in options.items())
    call = f"inductor.bind({op!r}, {taken}, {named})"
    # Each kind of call has a function of its own, which finds what serves once.
    layouts = [f"{i.get_dtype()} {i.get_device()} {i.get_size()}" for i in node.inputs]
    present = [values[name] != "None" for name in taken]
    name = f"{op}_{sha256(f'{call}{layouts}{present}'.encode()).hexdigest()[:12]}"
    wrapper.add_import_once("from tilenorm.ops.torch_ops import inductor")
    wrapper.add_import_once(f"{name} = {call}")
    return f"{name}({', '.join(values[name] for name in taken)})"


def _is_constant(value: str) -> bool:
    """Whether generated code has a value of its own for an option, and no name of a symbol."""
    try:
        literal_eval(value)
    except (ValueError, SyntaxError):
        return re.fullmatch(r"torch\.\w+", value) is not None  # a dtype
    return True


@cache
def _generation() -> str:
    package = Path(__file__).parents[2]
    files = [
        package / "row.py",
        package / "table.py",
        package / "spec.py",
        *(package / "ops").glob("**/*.py"),
    ]
    code = b"".join(file.read_bytes() for file in sorted(files))
    return f"tilenorm-{sha256(code).hexdigest()[:16]}"


def tensors_of(op: str, present: Sequence[str]) -> tuple[str, ...]:
    """The names of the tensors that a bound function of an op takes, where tensors of the names
    `present` are there.
    """
    if op in OPS:
        return tuple(port.name for port in OPS[op].takes)
    row = BACKWARD[op]
    return tuple(p.name for p in row.tensors if p not in row.takes_late or p.name in present)


def bind(op: str, taken: tuple[str, ...], **options) -> Callable:
    """A function of an op's tensors of the names `taken` that returns what the op returns, and None
    for what is absent. options: the op's other arguments by name.
    """
    return forward(op, **options) if op in OPS else backward(op, taken, **options)


def forward(name: str, *, hidden: int, save: bool, backend: str | None, **options) -> Callable:
    op = OPS[name]
    eps = tuple(options.pop(of) for of in op.eps)
    asked = (hidden, *(options[of] for of in op.options))
    most, bound_eps = MAX_ROWS * hidden, eps if op.calls else eps[0]
    numbers = [(i, port) for i, port in enumerate(op.makes) if port.number]
    bound: Bound | None = None
    run: Any = None

    @lru_cache(MOST_SHAPES)
    def view_of(shape: torch.Size) -> tuple | None:
        return _apart(dims.rows_shape(shape, hidden))

    def bound_forward(*tensors: Tensor | None) -> Sequence[Tensor | None]:
        results = None if run is None or modes() else run.repeated(tensors, bound_eps)
        repeated = results is not None
        results = list(results if repeated else called(tensors))
        view = view_of(tensors[0].shape) if save else None
        first, outputs = 1 + len(tensors), []
        for i in range(len(results)):
            outputs.append((NONE if results[i] is None else first + i, None))
        for i, port in numbers:
            if not save or results[i] is None:
                results[i], outputs[i] = None, (NONE, None)
                continue
            if port.given:
                sizes = dims.sizes_by_hidden(op.named(tensors), hidden)
                view = _apart(dims.shape(port, sizes))
            if view is not None:
                results[i], outputs[i] = reinterpret(results[i], *view), (first + i, view[0])
        if repeated:
            native.tell(run, bound_eps, tensors, tensors, range(1, first), outputs)
        return results

    def called(tensors: tuple) -> Sequence[Tensor | None]:
        nonlocal bound, run
        x = tensors[0]
        bound = bound or bound_of(op, tensors, asked, backend)
        if x.numel() > most or not bound.plain.takes(tensors):
            arguments = op.in_order(tensors, asked, eps, save, backend)
            results = getattr(torch.ops.tilenorm, name)(*arguments)
            return [results] if isinstance(results, Tensor) else results
        run = bound.training if save else bound.inference
        with on_device_of(x):
            return run(tensors, bound_eps)

    native = Generated(bound_forward)
    return native.function


def _apart(shape: tuple[int, ...]) -> tuple | None:
    """The shape and strides of numbers in several dimensions."""
    return None if len(shape) == 1 else (shape, contiguous_strides_of(shape))


def backward(
    op: str, taken: tuple[str, ...], *, hidden: int, backend: str | None, **options
) -> Callable:
    """The same of a backward op."""
    most, plain, kind, row = MAX_ROWS * hidden, Plain(), KINDS[op], BACKWARD[op]
    constant = options | {"hidden": hidden, "backend": backend}
    first, eps = len(row.takes), options["eps"]
    terms = range(first, first + sum(port.name in taken for port in TERMS))
    # What the op returns, of the gradients, y where it is written, and None.
    shown = itemgetter(*row.gradient_index)
    statistics = [i for i, name in enumerate(taken) if name in STATISTICS]
    run: Pass | None = None
    read: Any = None
    order: list[int] = []  # where the tensors stand that the pass reads; -1 for an absent one

    def bound_backward(*tensors: Tensor | None) -> Sequence[Tensor | None]:
        results = None
        if run is not None and not modes():
            # A key has the shapes of all tensors where heads are rotated.
            arguments = read(flat(tensors) if run.grouped else (*tensors, None))
            results = run.repeated(arguments, eps)
        if results is None:
            return called(tensors)
        first = 1 + len(tensors)
        places = (*(first + i if t is not None else NONE for i, t in enumerate(results)), NONE)
        reads = [1 + i if i >= 0 else NONE for i in order]
        outputs = [(place, None) for place in shown(places)]
        native.tell(run, eps, tensors, arguments, reads, outputs)
        return shown((*results, None))

    def flat(tensors: tuple) -> list:
        """The tensors with mean and rstd as passes take them, and None."""
        as_taken = [*tensors, None]
        for i in statistics:
            as_taken[i] = as_taken[i] if as_taken[i] is None else vector_of(as_taken[i])
        return as_taken

    def called(tensors: tuple) -> Sequence[Tensor | None]:
        nonlocal run, read, order
        arguments = constant | dict(zip(taken, tensors, strict=True))
        x = arguments["input"]
        if run is None:
            call = kind((), arguments)
            spec = call.spec
            needs = call.needs(spec)
            named = {port.role: port.name for port in row.tensors}
            places = [taken.index(named[role]) for role in spec.kernel_reads]
            order = [0, 1 if needs.dsum else -1, *places, *terms]
            read = itemgetter(*order)
            norm = norm_of(spec, x.device.type, x.get_device(), False, backend)
            run = norm.backward(spec, needs)
        if x.numel() > most or not plain.takes(tensors):
            return getattr(torch.ops.tilenorm, op)(**arguments)
        with on_device_of(x):
            return shown((*run(read(flat(tensors)), eps), None))

    native = Generated(bound_backward)
    return native.function
