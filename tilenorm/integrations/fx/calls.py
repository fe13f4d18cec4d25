"""The calls of tilenorm's ops in graphs. No other file knows the order of arguments and results.

Arguments and results have the names of the ops' schemas. The functions norm and norm_backward add
a call to a graph; Call reads one.
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_aggregate

from ...ops.library import norm_backward_fake, norm_fake
from ...ops.plans import spec_of_tensors
from ...ops.schemas import TERMS as MORE_TERMS
from ...ops.schemas import Backward
from ...ops.sharding import is_distributed
from ...ops.tensors import Saved, Tensors
from ...spec import Options
from .nodes import VALUES, Left, bind, is_idle, item_of, key_of, value_of, values_of

NORM = torch.ops.tilenorm.norm.default
NORM_BACKWARD = torch.ops.tilenorm.norm_backward.default
FAKES = {NORM: norm_fake, NORM_BACKWARD: norm_backward_fake}
TERMS = ("grad_output", *MORE_TERMS)
# What the forward and the backward call of a norm have in common.
COMMON = ("gate", "weight", "bias", *Options._fields, "eps")
EAGER_VALUES = "eager_input_vals"  # what Inductor compares an op's arguments with
# Metadata of a node's arguments and results.
OF_VALUES = (*VALUES, "tensor_meta", EAGER_VALUES)


def norm(like: Node, tensors: Tensors, options: Options, eps: float, save: bool) -> Node:
    """A call of tilenorm::norm with the metadata of the node `like`."""
    return _called(NORM, _norm_arguments(tensors, options, eps, save), like)


def norm_values(tensors: Tensors, options: Options, eps: float, save: bool) -> dict[str, Tensor]:
    """The results that tilenorm::norm has for these tensors, by name."""
    arguments = _in_order(NORM, _norm_arguments(tensors, options, eps, save))
    return dict(zip(results_of(NORM), _values(NORM, arguments), strict=True))


def norm_backward(like: Node, dy: Node, saved: Saved, options: Options, results: set[str]) -> Node:
    """A call of tilenorm::norm_backward. results: the names of those that are computed."""
    mask = [name in results for name in results_of(NORM_BACKWARD)[:5]]
    arguments = saved._asdict() | options._asdict()
    # Only second derivatives use eps. aten's op does not have it, so 0.0 stands for it here.
    arguments |= {"grad_output": dy, "input": saved.x, "eps": 0.0, "added": False}
    return _called(NORM_BACKWARD, arguments | {"output_mask": mask}, like)


def results_of(op: OpOverload) -> list[str]:
    """The names of an op's results, in order."""
    return [result.name for result in op._schema.returns]


def result_of(call: Node, name: str, like: Node) -> Node:
    """One result of a call, with the metadata of the node `like`."""
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
    """A call of one of tilenorm's ops.

    arguments: all of them by name. Raises Left if they do not fit the op's schema, or if a tensor
    has no metadata.
    """

    def __init__(self, node: Node):
        op: Any = node.target
        self.node, self.arguments = node, bind(node)
        for argument in op._schema.arguments:
            tensor = self.arguments[argument.name]
            if "Tensor" in str(argument.type) and tensor is not None and value_of(tensor) is None:
                raise Left(
                    f"its argument {argument.name!r} is {tensor}, of which no shape is known"
                )

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def readers(self, name: str) -> list[Node]:
        """The nodes that read one result."""
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
        of_values = Backward.of(self._values)
        if why := spec_of_tensors(of_values.tensors, of_values.options).output_refused:
            raise Left(f"its backward pass writes no y for {why}")
        values, names = values_of(self.node), results_of(NORM_BACKWARD)
        if not isinstance(values, tuple | list) or len(values) != len(names):
            raise Left("its results are not those of the op")
        self.change(output=True)
        self.node.meta[key_of(self.node)] = (*values[: names.index("output")], y)


def _norm_arguments(tensors: Tensors, options: Options, eps: float, save: bool) -> dict[str, Any]:
    given = {name: tensor for name, tensor in tensors._asdict().items() if tensor is not None}
    return {**given, **options._asdict(), "eps": eps, "save": save}


def _called(op: OpOverload, arguments: dict[str, Any], like: Node) -> Node:
    call = like.graph.call_function(op, _in_order(op, arguments))
    values = [value_of(a) if isinstance(a, Node) else a for a in call.args]
    _describe(call, _values(op, tuple(values)), like)
    return call


def _in_order(op: OpOverload, arguments: dict[str, Any]) -> tuple:
    """The arguments as the op takes them, without those at the end that are not given."""
    taken = op._schema.arguments
    last = max(i for i, argument in enumerate(taken) if argument.name in arguments)
    return tuple(arguments.get(a.name, a.default_value) for a in taken[: last + 1])


def _values(op: OpOverload, arguments: tuple) -> tuple[Tensor, ...]:
    """The results of an op; those of DTensors from the op itself, whose rules place them."""
    if not is_distributed(arguments[0]):
        return FAKES[op](*arguments)
    with torch.no_grad():
        return op(*arguments)


def derived(target, arguments: tuple, value: Tensor, like: Node, **kwargs) -> Node:
    """A new call that returns one tensor, with the metadata of the node `like`."""
    node = like.graph.call_function(target, arguments, kwargs)
    _describe(node, value, like)
    return node


def _describe(node: Node, value: object, like: Node) -> None:
    rest = {k: v for k, v in like.meta.items() if k not in OF_VALUES}
    node.meta = rest | {key_of(like): value}
