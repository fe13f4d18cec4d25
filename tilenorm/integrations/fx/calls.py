"""The calls of tilenorm's ops in graphs. No other file knows the order of arguments and results,
which have the names of the ops' schemas.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_aggregate

from ...ops.passes.bound import specs_of_tensors
from ...ops.passes.registry import cutile_refuses, device_of, spec_refused
from ...ops.pytorch.placements import is_distributed
from ...ops.torch_ops import internal_ops
from ...ops.torch_ops.library import KINDS, fake
from ...row import Op
from ...spec import Options
from ...table import OPS
from ...table import TERMS as LAST_TERMS
from .nodes import VALUES, Left, bind, is_idle, item_of, key_of, value_of, values_of

FORWARD: dict[Any, Op] = {getattr(torch.ops.tilenorm, name).default: op for name, op in OPS.items()}
ROTATED = torch.ops.tilenorm.rms_norm_rope.default
NORM_BACKWARD = torch.ops.tilenorm.norm_backward.default
FAKES: dict[Any, Callable] = {
    **{overload: partial(fake, KINDS[op.name]) for overload, op in FORWARD.items()},
    NORM_BACKWARD: partial(fake, internal_ops.NormBackward),
}
TERMS = ("grad_output", *(port.name for port in LAST_TERMS))
# What the forward and the backward call of a norm have in common. A forward op that lacks one of
# the options has its default.
COMMON = ("gate", "weight", "bias", *Options._fields, "eps")
EAGER_VALUES = "eager_input_vals"  # what Inductor compares an op's arguments with
# Metadata of a node's arguments and results.
OF_VALUES = (*VALUES, "tensor_meta", EAGER_VALUES)


class Tensors(NamedTuple):
    """The nodes, or the tensors, of a norm. With a scale, a gate lies by group, as the scale."""

    input: Any
    residual: Any = None
    gate: Any = None
    weight: Any = None
    bias: Any = None
    scale: Any = None
    shift: Any = None


def check_served(op: OpOverload, arguments: dict[str, Any]) -> None:
    """Raise Left if the kernels do not take the tensors of an op on their device."""
    row = FORWARD[op]
    tensors = [value_of(arguments.get(port.name)) for port in row.takes]
    asked = tuple(arguments[name] for name in ("hidden", *row.options))
    spec, x = specs_of_tensors(row, tensors, asked).spec, tensors[0]
    if x.is_cuda:
        reason = cutile_refuses(spec, 0, device_of("cuda", x.device.index))
    else:
        reason = spec_refused(spec) if x.is_cpu else f"its input is on {x.device.type}"
    if reason or spec.unserved:
        raise Left(reason or spec.unserved)


def arguments_of(
    tensors: Tensors, options: Options, eps: float = 0.0, save: bool = True
) -> tuple[OpOverload, dict[str, Any]]:
    """The op of a norm, and its arguments by name."""
    before = "" if tensors.residual is None else "add_"
    before = before if tensors.gate is None else "gated_"
    before = before if tensors.scale is None else "modulated_"
    op = getattr(torch.ops.tilenorm, f"{before}{options.norm}_norm").default
    values = tensors._asdict() | options._asdict() | {"eps": eps, "save": save, "out_dtype": None}
    values["norm_before_gate"] = not options.gate_first
    return op, values


def results_of(op: OpOverload) -> list[str]:
    return [result.name for result in op._schema.returns]


def result_of(call: Node, name: str, like: Node) -> Node:
    place = results_of(call.target).index(name)
    return derived(operator.getitem, (call, place), values_of(call)[place], like)


def read_by(node: Node) -> tuple[Node | None, str | None]:
    """The call of one of tilenorm's ops of which a node reads a result, and the result's name."""
    call, place = item_of(node)
    if call is None or call.target not in FAKES:
        return None, None
    names = results_of(call.target)
    return (call, names[place]) if place in range(len(names)) else (None, None)


class Call:
    """A call of one of tilenorm's ops. arguments: all of them by name.

    Raises Left if they do not fit the op's schema, or if a tensor has no metadata.
    """

    def __init__(self, node: Node):
        op: Any = node.target
        self.node, self.arguments, self.op = node, bind(node), FORWARD.get(op)
        for argument in op._schema.arguments:
            tensor = self.arguments[argument.name]
            if "Tensor" in str(argument.type) and tensor is not None and value_of(tensor) is None:
                raise Left(
                    f"its argument {argument.name!r} is {tensor}, of which no shape is known"
                )

    def __getitem__(self, name: str) -> Any:
        """An argument; of a forward op also one of COMMON that it lacks."""
        if name in self.arguments or self.op is None:
            return self.arguments[name]
        if name == "norm":
            return self.op.norm
        if name == "gate_first":
            return not self.arguments.get("norm_before_gate", True)
        return Options._field_defaults.get(name)

    def readers(self, name: str) -> list[Node]:
        return [user for user in self.node.users if read_by(user) == (self.node, name)]

    def used(self, name: str) -> list[Node]:
        """The nodes that read one result and that other nodes use."""
        return [node for node in self.readers(name) if not is_idle(node) and node.users]

    def change(self, **arguments: object) -> None:
        """Change some arguments, and the metadata of the arguments."""
        self.arguments |= arguments
        self.node.args, self.node.kwargs = tuple(self.arguments.values()), {}
        if EAGER_VALUES in self.node.meta:
            self.node.meta[EAGER_VALUES] = (self._values, {})

    @property
    def _values(self) -> tuple[object, ...]:
        """The traced values of the arguments."""
        arguments = tuple(self.arguments.values())
        return map_aggregate(arguments, lambda a: values_of(a) if isinstance(a, Node) else a)

    def write_output(self, y: Tensor) -> None:
        """Have a call of tilenorm::norm_backward write y once more.

        Raises Left if it cannot have the bits of y.
        """
        if why := internal_ops.NormBackward(self._values, {}).spec.output_refused:
            raise Left(f"its backward pass writes no y for {why}")
        values, names = values_of(self.node), results_of(NORM_BACKWARD)
        if not isinstance(values, tuple | list) or len(values) != len(names):
            raise Left("its results are not those of the op")
        self.change(output=True)
        self.node.meta[key_of(self.node)] = (*values[: names.index("output")], y)


def called(op: OpOverload, arguments: dict[str, Any], like: Node) -> Node:
    """A call of an op with the metadata of the node `like`."""
    ordered = _in_order(op, arguments)
    values = tuple([value_of(a) if isinstance(a, Node) else a for a in ordered])
    return derived(op, ordered, _values(op, values), like)


def _in_order(op: OpOverload, arguments: dict[str, Any]) -> tuple:
    """The arguments as the op takes them, without those at the end that are not given."""
    taken = op._schema.arguments
    present = {name for name, value in arguments.items() if value is not None}
    final = max(i for i, a in enumerate(taken) if a.name in present or not a.has_default_value())
    return tuple(arguments.get(a.name, a.default_value) for a in taken[: final + 1])


def _values(op: OpOverload, arguments: tuple) -> tuple[Tensor, ...]:
    """The results of an op; those of DTensors from the op itself, whose rules place them."""
    if not is_distributed(arguments[0]):
        return FAKES[op](*arguments)
    with torch.no_grad():
        return op(*arguments)


def derived(target, arguments: tuple, value: object, like: Node, **kwargs) -> Node:
    """A call that returns this value, with the other metadata of the node `like`."""
    node = like.graph.call_function(target, arguments, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k not in OF_VALUES} | {key_of(like): value}
    return node
