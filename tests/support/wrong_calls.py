"""Wrong calls of the functions, the modules and the integrations: those that follow from the table
of ops, and tables of the others.

A row of a table is the wrong arguments, the exception's type and a pattern of what it has to say.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace

import tilenorm
from tilenorm.integrations.fx import replace_norms
from tilenorm.row import Port
from tilenorm.table import (
    BRANCH_PORTS,
    MODULATED_NORMS,
    NORMS,
    NOT_OF_ROWS,
    OPS,
    OPTIONS,
    QUANTIZED_NORMS,
)

from .calls import arguments_of, tensors_of_op

X, W, HEADS, TWO_HEADS = torch.ones(3, 8), torch.ones(8), torch.ones(6, 8), torch.ones(2, 8)
ROWS, GROUPS = torch.ones(2, 6, 8), torch.ones(2, 3, 8)
HUGE = 10**400
NOT_SERVED = NotImplementedError
ROPE = "rms_norm_rope"
Row = tuple[dict[str, Any], type[Exception], str]


class Wrong(NamedTuple):
    """A wrong call.

    call: makes the call. message: a pattern of what the exception has to say, which is the
    argument, what it takes and what it got. expected: PyTorch's own call with the same arguments,
    which raises the exception that the call has to raise; or this exception's type where PyTorch
    has no such function. explained: the call of `explain` with the same arguments, if it has to
    raise the same.
    """

    call: Callable[[], object]
    message: str
    expected: Callable[[], object] | type[Exception]
    explained: Callable[[], object] | None = None


class Function(NamedTuple):
    """A right call of a function, and its wrong calls by what is wrong."""

    right: Callable[[], object]
    wrong: dict[str, Wrong]


# Of F.rms_norm and F.layer_norm.
BY_PYTORCH = {
    # A class that has __torch_function__: these are PyTorch's own words.
    "input a class": ((torch.Tensor, (8,)), r"no implementation found for '.*_norm'"),
    "input of another first size": ((X, (4, 8)), r"'input' takes .* \[4, 8\], got \[3, 8\]"),
    "input a scalar": ((X[0, 0], (1,)), r"'input' takes at least the 1 dimensions .*, got 0"),
    "input a matrix": ((X, (2, 3, 8)), r"'input' takes at least the 3 dimensions .*, got 2"),
    "shape a bool": ((X, True), r"'normalized_shape' takes a tuple of ints, got bool"),
    "shape a tensor": ((X, W.int()), r"'normalized_shape' takes a tuple of ints, got Tensor"),
    "shape of floats": ((X, (8.0,)), r"'normalized_shape' takes a tuple of ints, got \(8\.0,\)"),
    "shape of bools": ((X[:, :1], (True,)), r"'normalized_shape' takes .*, got \(True,\)"),
    "shape of float tensors": ((X, (W[0],)), r"'normalized_shape' takes .*, got \(tensor"),
    "shape beyond 64 bits": ((X, (2**70,)), r"'normalized_shape' takes .*, got \(1180591"),
    "shape empty": ((X, ()), r"'normalized_shape' takes at least one size, got \(\)"),
    "shape negative": ((X, (-1,)), r"'input' takes .* \[-1\], got \[3, 8\]"),
    "weight of another rank": ((X, (8,), W[None]), r"'weight' takes .* \[8\].*, got \[1, 8\]"),
    "eps a vector": ((X, (8,), {"eps": W[:1]}), r"'eps' takes a float.*, got"),
    "eps of a graph": ((X, (8,), {"eps": torch.ones((), requires_grad=True)}), r"eps"),
    "eps beyond floats": ((X, (8,), {"eps": HUGE}), r"'eps' takes .* no float holds"),
    "no arguments": ((), "missing .*'input' and 'normalized_shape'"),
}

# Of F.layer_norm alone.
LAYER_NORM = {"eps None": ((X, (8,), {"eps": None}), r"'eps' takes a float, got NoneType")}

EVERY: tuple[Row, ...] = (
    ({"normalized_shape": 8}, TypeError, "'normalized_shape' takes .* got int"),
    ({"eps": "1"}, TypeError, "'eps' takes a float.*, got str"),
    ({"eps": torch.tensor(1j)}, TypeError, "'eps' takes a float"),
    ({"input": torch.nested.nested_tensor([X, X])}, RuntimeError, "takes|NestedTensorImpl"),
    ({"backend": 3}, TypeError, "'backend' takes a str or None, got int"),
)
NESTED = torch.nested.nested_tensor([X, X], layout=torch.jagged)
NO_NESTED: Row = {"input": NESTED}, NOT_SERVED, "'input' takes (no nested tensor|the layout)"
UNKNOWN: Row = {"backend": "triton"}, ValueError, "argument 'backend' takes 'cutile' or"

BY_HEADS: tuple[Row, ...] = (
    ({"weight": TWO_HEADS}, RuntimeError, r"'weight' takes .* by heads, \[6, 8\], got \[2, 8\]"),
    ({"weight": HEADS}, RuntimeError, r"'bias' takes the shape of weight \[6, 8\], got \[8\]"),
    ({"bias": HEADS}, RuntimeError, r"'bias' takes the shape of weight \[8\], got \[6, 8\]"),
)

# Of the functions that normalise the sum with a residual.
ADDED: tuple[Row, ...] = (
    ({"residual": (ROWS,) * 3}, TypeError, "takes .* one or two Tensors, got"),
    ({"residual": ()}, TypeError, r"takes .* one or two Tensors, got \[\]"),
    ({"residual": (1.0, ROWS)}, TypeError, r"got \[float, Tensor\]"),
    ({"residual": (ROWS, ROWS[:1])}, RuntimeError, r"'residual\[1\]' takes"),
    ({"residual": (ROWS.half(), ROWS.bfloat16())}, RuntimeError, r"'residual\[0\]' takes the dtype"
     r" of the input or of residual\[1\], torch.float32 or torch.bfloat16, got torch.float16"),
    ({"dropout_scale": 2.0}, ValueError, "'dropout_scale' takes 1.0 without"),
    ({"residual": ROWS.half(), "layer_scale": W}, RuntimeError, "'residual' takes at least the d"),
    ({"residual": (ROWS, ROWS), "layer_scale": W}, RuntimeError, "'layer_scale' takes None with"),
)  # fmt: skip

MODULATED: tuple[Row, ...] = (
    *(
        ({"scale": torch.ones(*groups, 8)}, RuntimeError, "'scale' takes leading sizes")
        for groups in ((3,), (6,), (2, 4), (1, 6), (2, 6, 1, 2), (0,))
    ),
    ({"shift": W}, RuntimeError, "'shift' takes the shape of scale"),
    ({"gate": W}, RuntimeError, "'gate' takes the shape of scale"),
    ({"residual": None}, ValueError, "'gate' takes None without a residual"),
)

WIDE = torch.ones(3, 128)
MX, TENSOR = {"scaling": "mx"}, {"scaling": "tensor"}
PARTLY = {"input": WIDE[:, :120], "normalized_shape": (120,), "weight": None, "bias": None}
QUANTIZED: tuple[Row, ...] = (
    (
        {"dtype": torch.float16},
        NOT_SERVED,
        "'dtype' takes torch.float8_e4m3fn or .*, got .*float16",
    ),
    ({"layout": "swizzled"}, ValueError, "'layout' takes 'row' with scaling='row', got 'swizzled'"),
    (
        MX | {"power_of_2": True},
        ValueError,
        "'power_of_2' takes no True with scaling='mx': its sca",
    ),
    ({"scale": W[:1]}, ValueError, "'scale' takes None with scaling="),
    (TENSOR, TypeError, "'scale' takes a Tensor of one float32 .*, got NoneType"),
    (TENSOR | {"scale": W}, RuntimeError, r"'scale' takes one torch.float32 on cpu, got"),
    (PARTLY | MX, RuntimeError, "takes a multiple of 32 elements with scaling='mx', got 120"),
    (PARTLY | {"scaling": "block"}, RuntimeError, "a multiple of 128 .*='block', got 120"),
)

ROTATED: tuple[Row, ...] = (
    ({"input": X}, ValueError, "'input' takes at least the three dimensions"),
    ({"normalized_shape": (6, 4, 8)}, RuntimeError, "'normalized_shape' takes"),
    ({"key": torch.ones(2, 5, 2, 8)}, RuntimeError, "'key' takes the input's shape"),
    ({"key": torch.ones(2, 6, 2, 8).half()}, RuntimeError, "'key' takes the input's dtype"),
    ({"key": None}, ValueError, "'key_weight' takes None without a key"),
    ({"weight": None}, ValueError, "'key_weight' take two Tensors or None"),
    ({"weight": torch.ones(4, 8)}, RuntimeError, "'weight' takes the shape"),
    ({"rotary_dim": 7}, ValueError, "'rotary_dim' takes an even int from 2 to"),
    ({"rotary_dim": 10}, ValueError, "'rotary_dim' takes an even int from 2 to"),
    ({"rotary_dim": 8.0}, TypeError, "'rotary_dim' takes an even int from 2 to"),
    ({"rotary_dim": 6}, ValueError, "'cos' takes rotary_dim or rotary_dim / 2 columns"),
    ({"cos": torch.ones(5, 8), "sin": torch.ones(5, 8)}, RuntimeError, "'cos' takes rows that br"),
    ({"sin": torch.ones(6, 4)}, RuntimeError, "'sin' takes the shape"),
    ({"sin": torch.ones(6, 8).half()}, RuntimeError, "'sin' takes the dtype of cos"),
    ({"cos": torch.ones(6, 8).requires_grad_()}, RuntimeError, "'cos' takes .* no gradient"),
    ({"cos": torch.ones(1, 6, 8), "sin": torch.ones(1, 6, 8), "positions": torch.arange(6)},
     RuntimeError, "'cos' takes two dimensions with positions"),
    ({"heads_first": 1}, TypeError, "heads_first' takes a bool"),
    ({"input": ROWS, "heads_first": True}, ValueError, "'input' takes four dimensions"),
    ({"input": 1, "heads_first": True}, TypeError, "'input' takes a Tensor"),
    ({"input": torch.ones(6, 4, 8), "key": torch.ones(6, 2, 8), "output_heads_first": True},
     ValueError, "'output_heads_first' takes True for four dimensions"),
    ({"input": torch.ones(2, 6, 1, 8), "weight": None, "key_weight": None}
     | {"normalized_shape": (1, 8)}, RuntimeError, "'key' takes one head where the input has one"),
)  # fmt: skip


def with_keywords(function: Callable, arguments: tuple) -> Callable[[], object]:
    """A call. A dict of names at the end of the arguments holds keyword arguments."""
    keywords = {}
    if arguments and isinstance(arguments[-1], dict) and str in map(type, arguments[-1]):
        *arguments, keywords = arguments
    return lambda: function(*arguments, **keywords)


def of_port(port: Port, right: torch.Tensor) -> Iterator[tuple[object, type[Exception], str]]:
    """What a tensor may not be."""
    yield [1.0], TypeError, r"takes a Tensor.*, got (list|\[float\])"
    if port.needed:
        yield None, TypeError, "takes a Tensor, got NoneType"
    with_rows = port.dims == "... n" and port.like != "bool"
    if port.like in ("bool", "int32 int64"):
        yield right.float(), NOT_SERVED, "takes (torch.bool|int32 or int64), got torch.float32"
        yield right[:-1], RuntimeError, "takes (the input's shape|what broadcasts)"
    else:
        yield right.int(), NOT_SERVED, "takes float16, .* got torch.int32"
        yield right + 0j, NOT_SERVED, "takes float16, .* got torch.complex64"
        if port.dims != "t? r":
            yield right[..., :-1], RuntimeError, r"takes .*, got .*7\]"
        if port.dims == "n" and port.of == "input":
            yield ROWS, RuntimeError, "takes the shape of normalized_shape"
    if with_rows:
        yield right.to_sparse(), NOT_SERVED, "takes the layout .* got torch.sparse_coo"
        # PyTorch writes no guard for some layouts.
        yield right.to_mkldnn(), NOT_SERVED, "takes the layout"
        yield torch.quantize_per_tensor(right, 0.1, 0, torch.qint8), NOT_SERVED, "takes float16"
    if port.name != "input":
        yield right.to("meta"), RuntimeError, "takes the input's device cpu, got meta"
        if with_rows:
            yield right[:1], RuntimeError, r"takes the input's shape .*, got \[1,"


def of_option(name: str) -> Iterator[tuple[object, type[Exception], str]]:
    """What an option may not be."""
    kind, _, words = OPTIONS[name]
    if words:
        for value in (None, words[0].title(), 1, W.numpy()):
            yield value, ValueError, f"takes '{words[0]}' or .*, got"
    elif kind == "float":
        for value in ("1", None, W[0]):
            yield value, TypeError, "takes a float, got"
        yield HUGE, OverflowError, "takes a float, got .*holds"
    elif kind == "bool":
        for value in (1, X):
            yield value, TypeError, f"takes a bool.*, got {type(value).__name__}"
    elif name == "out_dtype":
        for value in ("float32", X):
            yield value, TypeError, f"takes a torch.dtype or None, got {type(value).__name__}"
        for value in (torch.int8, torch.complex64, torch.float8_e4m3fn):
            yield value, NOT_SERVED, f"takes float16, bfloat16, .*, got {value}"


def right_of(op: str) -> dict[str, Any]:
    """Right arguments of a function, with all tensors that a call may have at once."""
    tensors = {
        n: t
        for n, t in tensors_of_op(op).items()
        if n not in (*(port.name for port in BRANCH_PORTS), "addend")
    }
    tensors.pop("positions", None)
    scaling = {"scaling": "row"} if OPS[op].quantized else {}
    return {**arguments_of(tensors), "normalized_shape": (8,), **scaling}


def rows_of(op: str) -> Iterator[Row]:
    """What may not be given to a function."""
    tensors = tensors_of_op(op)
    for port in OPS[op].takes:
        wrong = of_port(port, tensors[port.name]) if port.name in tensors else ()
        for value, kind, message in wrong:
            if port.name != "addend":
                yield {port.argument: value}, kind, f"'{port.argument}' {message}"
            elif isinstance(value, torch.Tensor):
                yield {"residual": (value, ROWS)}, kind, rf"'residual\[0\]' {message}"
    for name in OPS[op].options:
        for value, kind, message in of_option(name):
            yield {name: value}, kind, f"'{name}' {message}"
    yield from EVERY
    yield from BY_HEADS if op in NORMS else ()
    if OPS[op].quantized or op in NOT_OF_ROWS:
        yield NO_NESTED
    yield from ADDED if op in ("add_rms_norm", "add_layer_norm") else ()
    yield from MODULATED if op in MODULATED_NORMS else ()
    yield from QUANTIZED if op in QUANTIZED_NORMS[:1] else ()
    yield from ROTATED if op == ROPE else ()


def of_functions() -> Iterator[tuple[str, Function]]:
    """Every function, by its name, and those of PyTorch once more with PyTorch's exceptions."""
    for op in OPS:
        function, given, wrong = getattr(tilenorm, op), right_of(op), {}
        for changes, kind, message in (*rows_of(op), UNKNOWN):
            calls = [
                with_keywords(f, (*names, given | changes))
                for f, names in ((function, ()), (tilenorm.explain, (op,)))
            ]
            explained = None if "backend" in changes else calls[1]
            wrong[f"{[*changes]}: {kind.__name__}: {message}"] = Wrong(
                calls[0], message, kind, explained
            )
        yield op, Function(with_keywords(function, (given,)), wrong)
    for op in ("rms_norm", "layer_norm"):
        wrong = {}
        rows = BY_PYTORCH | (LAYER_NORM if op == "layer_norm" else {})
        for what, (arguments, message) in rows.items():
            ours, theirs = (with_keywords(getattr(f, op), arguments) for f in (tilenorm, F))
            # Where the arguments do not fit the signature the message is Python's own.
            explained = with_keywords(tilenorm.explain, (op, *arguments))
            wrong[what] = Wrong(ours, message, theirs, explained if message[0] == "'" else None)
        right = with_keywords(getattr(tilenorm, op), (right_of(op),))
        yield f"{op} as PyTorch's", Function(right, wrong)


# Of each row: the arguments, for some the exception, and the message.
# Of the modules' constructors, with torch.nn's.
MADE = (
    ((None,), r"'normalized_shape' takes an int or .*, got NoneType"),
    (((8.0,),), r"'normalized_shape' takes an int or .*, got \(8\.0,\)"),
    ((-1,), r"'normalized_shape' takes .* from 0 on, got \(-1,\)"),
    ((2**70,), r"'normalized_shape' takes .* ints.*, got \(1180591"),
    ((8, {"dtype": "float32"}), r"'dtype' takes a torch.dtype .*, got str"),
    ((8, {"dtype": torch.int32}), r"'dtype' takes a floating.*, got torch.int32"),
    ((8, {"device": "nowhere"}), r"one of cpu, cuda.* device string: nowhere"),
    ((8, {"device": []}), r"device'? ?(must be torch.device, not |=)list"),
)

# Of the modules' constructors alone.
MADE_ALONE = (
    ((8, {"offset": "1"}), TypeError, "'offset' takes a float, got str"),
    ((8, {"rounding": "Late"}), ValueError, "'rounding' takes .*, got 'Late'"),
    ((8, {"out_dtype": "half"}), TypeError, "'out_dtype' takes a torch.dtype or None, got str"),
    ((8, {"out_dtype": torch.int8}), NOT_SERVED, "'out_dtype' takes float16, .* got torch.int8"),
)

# Of a module's forward, with torch.nn's.
FORWARD = (
    ((None,), "'input' takes a Tensor, got NoneType"),
    ((X.int(),), "'input' takes float16, .*, got torch.int32"),
    ((X[:, :7],), r"'input' takes .* \[8\], got \[3, 7\]"),
)

# Attributes of a module that someone set, with torch.nn's.
SET = (
    ({"eps": "1"}, "'eps' takes a float.*, got str"),
    ({"weight": nn.Parameter(W[:7])}, r"'weight' takes .*, got \[7\]"),
    ({"normalized_shape": (7,)}, r"'input' takes .* \[7\], got \[3, 8\]"),
)


def plus(x):
    return x + 1


MODE_AND_OPTIONS = "(Either mode or options|'mode' takes None beside options, got 'default')"
# Of tilenorm.compile, with torch.compile's.
COMPILED = (
    ((3,), "callable function is expected, but .*int.* is provided"),
    ((plus, {"mode": "mine"}), "mode=mine, should be one of: default"),
    ((plus, {"options": {"mine": 1}}), "option mine, known options are"),
    ((plus, {"mode": "default", "options": {"max_autotune": True}}), MODE_AND_OPTIONS),
    ((plus, {"backend": "nonsense"}), "backend: 'nonsense'.*list_backends"),
    ((plus, {"dynamic": "yes"}), r"to be a bool, got .*str|^$"),
)


def model():
    return nn.Sequential(nn.LayerNorm(8))


MODEL, PATCHED, LINEAR = model(), model(), nn.Linear(2, 2)
tilenorm.patch(PATCHED)
GRAPH = symbolic_trace(plus)
A_MODEL, A_GRAPH = "'model' takes .*, got ", "'graph_module' takes a GraphModule, got "
A_WHERE = "'where' takes .*, got str"
LOW_ALONE = "'memory' takes 'low' with backend 'inductor' alone, got .*'eager'"
# Of what PyTorch has no counterpart of: the function, a right call, and the wrong ones.
INTEGRATIONS = (
    (
        tilenorm.patch,
        lambda: len(tilenorm.patch(model()).patched),
        ((3,), TypeError, A_MODEL + "int"),
        ((nn.Linear,), TypeError, A_MODEL + "type"),
        ((MODEL, {"where": "0"}), TypeError, A_WHERE),
        ((MODEL, {"residual": 1}), TypeError, "takes a bool, got int"),
        ((PATCHED,), RuntimeError, "0 is already patched; tilenorm.unpatch"),
    ),
    (
        tilenorm.unpatch,
        lambda: tilenorm.unpatch(MODEL),
        ((nn.LayerNorm,), TypeError, A_MODEL + "type"),
    ),
    (
        tilenorm.compile,
        lambda: callable(tilenorm.compile(plus)),
        ((plus, {"where": "norm"}), TypeError, A_WHERE),
        ((plus, {"options": [1]}), TypeError, "'options' takes .* got list"),
        ((plus, {"rotation": 1}), TypeError, "takes a bool, got int"),
        ((plus, {"memory": "high"}), ValueError, "'memory' takes 'low' or None, got 'high'"),
        ((plus, {"memory": "low", "backend": "eager"}), ValueError, LOW_ALONE),
    ),
    (
        replace_norms,
        lambda: replace_norms(GRAPH).left,
        ((LINEAR,), TypeError, A_GRAPH + "Linear"),
        ((GRAPH, {"fold": "all"}), TypeError, "'fold' takes a bool, got str"),
        ((GRAPH, {"where": "norm"}), TypeError, A_WHERE),
    ),
    (
        tilenorm.explain,
        lambda: tilenorm.explain("rms_norm", X, (8,)).chosen,
        (("softmax",), ValueError, "'op' takes one of .*, got 'softmax'"),
        (("rms_norm", X, (8,), {"epsilon": 1.0}), TypeError, "unexpected .* 'epsilon'"),
    ),
)


def named(wrong: list[Wrong]) -> dict[str, Wrong]:
    return {f"{number}: {w.message}": w for number, w in enumerate(wrong)}


def of_modules() -> Iterator[tuple[str, Function]]:
    """Each module, by its name, and its forward."""
    for name in ("RMSNorm", "LayerNorm"):
        kinds = ours, _ = getattr(tilenorm, name), getattr(nn, name)
        made = [_pair(kinds, *row) for row in MADE] + [_alone(ours, *row) for row in MADE_ALONE]
        yield name, Function(lambda ours=ours: ours(8)(X), named(made))
        modules = [kind(8) for kind in kinds]
        called = [_pair(modules, *row) for row in FORWARD]
        for attributes, message in SET:
            changed = [_with_attributes(kind(8), attributes) for kind in kinds]
            called.append(_pair(changed, (X,), message))
        yield f"{name}(8)", Function(lambda module=modules[0]: module(X), named(called))


def of_integrations() -> Iterator[tuple[str, Function]]:
    """Each integration, by its name."""
    for function, right, *rows in INTEGRATIONS:
        wrong = [_alone(function, *row) for row in rows]
        if function is tilenorm.compile:
            wrong += [_pair((function, torch.compile), *row) for row in COMPILED]
        yield function.__name__, Function(right, named(wrong))


def _alone(function: Callable, arguments: tuple, kind: type[Exception], message: str) -> Wrong:
    return Wrong(with_keywords(function, arguments), message, kind)


def _pair(functions: Sequence[Callable], arguments: tuple, message: str) -> Wrong:
    """Our call, and PyTorch's call with the same arguments."""
    ours, theirs = (with_keywords(function, arguments) for function in functions)
    return Wrong(ours, message, theirs)


def _with_attributes(module: nn.Module, attributes: dict) -> nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
