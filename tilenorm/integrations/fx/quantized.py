"""quantize_norms: a norm and the chain that quantises it become tilenorm::norm_quantized.

The pass runs after the norms of a graph have become tilenorm::norm. What a chain is, scaling.py
tells.
"""

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node

from ...ops.plans import spec_of_tensors
from ...ops.quantized.library import norm_quantized_fake
from ...ops.registry import cutile_refuses, device_of, spec_refused
from ...ops.sharding import is_distributed
from ...ops.tensors import Tensors
from ...spec import Options, Quantization
from .calls import bind
from .emit import ATEN, derived, new_call, size_of, take_over, written
from .gradient import item_of
from .nodes import Left, erase, is_idle, value_of, values_of
from .norms import check_contiguous, known, same_sizes
from .scaling import NORM_QUANTIZED, OUTPUT, Chain, match_chain

# For each result of tilenorm::norm: its index among the results of tilenorm::norm_quantized.
PLACES = {0: OUTPUT, 1: 4, 2: 5, 3: 6}
Q, SCALE = 0, 1
TENSORS = ("input", "residual", "weight", "bias", "addend")


def quantize_norms(
    graph: Graph,
) -> tuple[list[tuple[str, str, Node]], list[tuple[str, str]]]:
    """Replace the norms of a graph that are quantised, and the chains that quantise them.

    Returns (kind, the name of q, the norm's call that was erased) of each chain that became an op,
    and (the name of q, reason) of each other chain. The codes and the scales keep their bits. A
    factor that is rounded down to a power of two is the power of two: PyTorch's
    exp2(floor(log2(factor))) on a CPU is twice as large for some factors just below one.

    No node makes this raise. Chains that start at no norm are not reported.
    """
    quantized, left = [], []
    for q in list(graph.nodes):
        try:
            if chain := match_chain(q):
                name = q.name
                quantized.append((_replace(graph, chain), name, chain.norm))
        except Left as reason:
            left.append((q.name, str(reason)))
    return quantized, left


def _replace(graph: Graph, chain: Chain) -> str:
    """Replace one chain. Returns the new op's kind. Raises Left if this would change a result."""
    arguments = _arguments(chain)
    _check(chain, arguments)
    removed, output = _removed(chain)
    how = chain.how._replace(output=output)
    sizes = {node: _sizes(chain, node) for node in removed}
    with graph.inserting_before(chain.norm):
        given = _vector(graph, chain.given)
        call = _call(graph, chain, arguments, how, given)
        new = {
            node: _result(graph, call, node) if output or node is not chain.y else None
            for node in chain.norm.users
        }
        for node in removed:
            new[node] = _shaped(graph, call, chain, node, sizes[node])
    for user in [user for user in chain.y.users if is_idle(user) and not output]:
        erase(graph, user)
    take_over(graph, new, (chain.norm, *chain.parts))
    added = "" if arguments["residual"] is None else "add_"
    return f"{added}{arguments['norm']}_norm_quantized"


def _arguments(chain: Chain) -> dict[str, Any]:
    """The arguments of the norm's call. Raises Left if the quantised op does not take them."""
    arguments = bind(chain.norm)
    for name in ("gate", "skip", "dropout_mask", "layer_scale"):
        if arguments[name] is not None:
            raise Left(f"its norm has a {name}, which no quantised norm takes")
    for name in (*Options._fields, "eps", "save"):
        if isinstance(arguments[name], Node | SymInt | torch.SymFloat):
            raise Left(f"the argument {name!r} of its norm is symbolic")
    for name in TENSORS:
        if arguments[name] is not None:
            known(arguments[name])
    words = {"norm": ("rms", "layer"), "rounding": ("late", "early")}
    for name, takes in words.items():
        if arguments[name] not in takes:
            raise Left(f"the argument {name!r} of its norm is {arguments[name]!r}")
    if arguments["hidden"] < 1:
        raise Left("its norm has no elements")
    return arguments


def _check(chain: Chain, arguments: dict[str, Any]) -> None:
    """Raise Left, with the reason, if tilenorm's op would give another result."""
    norm, q, end = chain.norm, chain.q, max((chain.q, *chain.inverses))
    if any(tag in node.meta for tag in ("recompute", "ac_graph_id") for node in (norm, q)):
        raise Left("it is part of a forward pass that is computed again")
    for node in (q, *chain.inverses):
        if known(node).requires_grad:
            raise Left(f"{node.name} passes a gradient on, and the op's results pass none")
        check_contiguous("quantised output" if node is q else "scale", known(node))
    for node in norm.users:
        if item_of(node)[0] is not norm or node.args[1] not in tuple(PLACES):
            raise Left(f"{node.name} reads none of the results of its norm")
    x = known(arguments["input"])
    if is_distributed(x):
        raise Left("its tensors are DTensors")
    if chain.given is not None and not chain.given < norm:
        raise Left(f"its scale {chain.given.name} is computed after the norm")
    if chain.given is not None and known(chain.given).device != x.device:
        raise Left(f"its scale is on {known(chain.given).device}, its norm on {x.device}")
    switches = [n for n in q.graph.nodes if n.target is torch._C._set_grad_enabled]
    if written(norm, end, tuple(switches)):
        raise Left("a node between its operations may write to a tensor")
    if reason := _refused(arguments, chain.how, x):
        raise Left(reason)


def _refused(arguments: dict[str, Any], how: Quantization, x: Tensor) -> str | None:
    """Why the kernels do not take the op's arguments, or None."""
    tensors = {n: value_of(arguments[n]) for n in TENSORS if arguments[n] is not None}
    options = Options(*(arguments[name] for name in Options._fields))
    spec = replace(spec_of_tensors(Tensors(**tensors), options), quantized=how)
    if x.device.type == "cuda":
        return cutile_refuses(spec, 0, device_of("cuda", x.device.index))
    return spec_refused(spec) if x.device.type == "cpu" else f"its input is on {x.device.type}"


def _removed(chain: Chain) -> tuple[list[Node], bool]:
    """The nodes that results of the op replace, and whether anything else reads y."""
    removed = [chain.q, *chain.inverses, *([chain.factor] if chain.others else [])]
    gone = set(removed)
    for node in sorted(chain.parts - {chain.y}, reverse=True):
        if all(user in gone or is_idle(user) for user in node.users):
            gone.add(node)
    return removed, any(user not in gone and not is_idle(user) for user in chain.y.users)


def _sizes(chain: Chain, node: Node) -> list[int | tuple[int, SymInt]]:
    """The sizes of a node, of which a symbolic one is (the norm's dimension, the size) or -1."""
    x, found = known(bind(chain.norm)["input"]).shape, []
    for size in known(node).shape:
        same = [i for i, n in enumerate(x) if same_sizes([n], [size])]
        found.append(size if isinstance(size, int) else (same[0], size) if same else -1)
    if found.count(-1) > 1:
        raise Left(f"the shape {list(known(node).shape)} of {node.name} is symbolic")
    return found


def _vector(graph: Graph, given: Node | None) -> Node | None:
    """The static scale with the one dimension that the op takes."""
    if given is None or known(given).dim() == 1:
        return given
    return derived(graph, ATEN.view.default, (given, [1]), known(given).view(1), given)


def _call(
    graph: Graph, chain: Chain, arguments: dict, how: Quantization, given: Node | None
) -> Node:
    """The call of the quantised op."""
    tensors = (arguments[name] for name in TENSORS)
    options = (arguments[name] for name in ("hidden", "norm", "offset", "rounding", "eps"))
    scaling, _, *rest = how
    asked = (scaling, known(chain.q).dtype, *rest, arguments["save"], arguments["backend"])
    given = (*tensors, given, *options, *asked)
    return new_call(graph, NORM_QUANTIZED, norm_quantized_fake, given, chain.norm)


def _result(graph: Graph, call: Node, old: Node) -> Node:
    """The result of the quantised op in the place of a result of the norm."""
    _, index = item_of(old)
    place = PLACES[index]
    return derived(graph, operator.getitem, (call, place), values_of(call)[place], old)


def _shaped(graph: Graph, call: Node, chain: Chain, old: Node, sizes: list) -> Node:
    """q, the scale, or its reciprocal in the place of the factor, in the shape of an old node."""
    place = Q if old is chain.q else SCALE
    value, wanted = values_of(call)[place], known(old)
    node = derived(graph, operator.getitem, (call, place), value, old)
    if old is chain.factor:  # a power of two, whose reciprocal is exact
        node = derived(graph, ATEN.reciprocal.default, (node,), value.reciprocal(), old)
    if not same_sizes(value.shape, wanted.shape):
        x = bind(chain.norm)["input"]
        given = [size_of(graph, x, *n) if isinstance(n, tuple) else n for n in sizes]
        node = derived(graph, ATEN.view.default, (node, given), wanted, old)
    node.meta = dict(old.meta)
    return node
