"""Drawn calls on DTensors: any op, shape, placements and gradients asked for, with sizes of 1.

A rule sees an input's shape and `hidden`, the number of elements of a row. Sizes of 1 between the
heads and the rest of a row do not change `hidden`, and the heads are then not the last dimension
before the elements that `hidden` counts.
"""

import random
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.calls import (
    MASKED,
    RMS,
    Form,
    call,
    gradients_like,
    op_arguments,
    step,
    tensors_of_op,
)
from tests.support.calls import random as numbers
from tilenorm.ops.torch_ops.decompositions import KINDS
from tilenorm.ops.torch_ops.sharding import strategies
from tilenorm.table import BACKWARD, NOT_OF_ROWS, OPS

from .placing import P, R, case, counted, placed
from .world import NAMES, mesh, on_every_rank, slow_but_first

SHARDED = [op for op in OPS.values() if not op.quantized]
ROWS = [(8,), (1, 8), (8, 1), (2, 4), (1, 2, 1, 4), (1,), (1, 1)]
SIZES = (1, 1, 2, 3, 4, 6)
HEAD = 8  # elements of a head that is rotated
D = torch.float64


class Drawn(NamedTuple):
    """A call. tensors: by their names in the schema. dims: how many dimensions are normalised."""

    form: Form
    tensors: dict[str, Tensor]
    dims: int

    @property
    def leading(self) -> int:
        return self.tensors["input"].dim() - self.dims

    @property
    def leaves(self) -> list[str]:
        """The names of the tensors that have gradients."""
        grad = {port.name for port in OPS[self.form.op].takes if port.grad}
        return [name for name in self.tensors if name in grad]


def sizes_of(draw: random.Random, most: int) -> list[int]:
    return [draw.choice(SIZES) for _ in range(draw.randint(1, most))]


def groups_of(draw: random.Random, leading: list[int]) -> list[int]:
    """Leading sizes of what lies by group: the last may be a divisor, and a 1 may stand behind."""
    groups = leading[: draw.randint(0, len(leading))]
    if groups:
        groups[-1] = draw.choice([n for n in range(1, groups[-1] + 1) if not groups[-1] % n])
    return groups + [1] * (len(groups) < len(leading) and draw.random() < 0.3)


def drawn_rows(draw: random.Random) -> tuple[dict, tuple[int, ...]]:
    """The shapes by ports' dimensions, with `next_` those of a second norm; and a row's shape."""
    row, leading = draw.choice(ROWS), sizes_of(draw, 3)
    shapes = {"... n": (*leading, *row), "n": row}
    for name in ("[h] n", "next_[h] n"):
        shapes[name] = (leading[-1], *row) if draw.random() < 0.5 else row
    return shapes | {"g n": (*groups_of(draw, leading), *row)}, row


def drawn_heads(draw: random.Random) -> tuple[dict, tuple[int, ...], dict]:
    """The same where heads are rotated, `key_n` that of the key's weight; and the options."""
    tokens, heads, keys = sizes_of(draw, 2), draw.choice(SIZES), draw.choice(SIZES)
    together = draw.random() < 0.4
    keys = 1 if together and heads == 1 else keys
    row = (heads, HEAD) if together else (HEAD,)
    shapes = {"... n": (*tokens, heads, HEAD), "n": row, "t k d": (*tokens, keys, HEAD)}
    shapes["key_n"] = (keys, HEAD) if together else row
    broadcast = [draw.choice((1, n)) for n in tokens[draw.randint(0, len(tokens) - 1) :]]
    shapes |= {"t? r": (*broadcast, HEAD), "t?": None}
    if draw.random() < 0.4:
        shapes |= {"t? r": (9, HEAD), "t?": tuple(broadcast)}
    return shapes, row, {"output_heads_first": len(tokens) == 2 and draw.random() < 0.5}


def drawn(draw: random.Random) -> Drawn:
    op, options = draw.choice(SHARDED), {}
    if op.rotated:
        shapes, row, options = drawn_heads(draw)
    else:
        shapes, row = drawn_rows(draw)
    if "out_dtype" in op.options:
        options["out_dtype"] = draw.choice([None, None, torch.float32, torch.bfloat16])
    absent = {port.name for port in op.takes if not port.needed and draw.random() < 0.3}
    if {"dropout_mask", "layer_scale"} - absent:
        absent |= {"addend"}
    if "residual" in absent:
        absent |= {"gate"}
    absent -= {"key_weight"}  # a key has a weight where the queries have one
    if {"key", "weight"} & absent:
        absent |= {"key_weight"}
    tensors = {}
    for seed, port in enumerate(op.takes):
        prefix = port.name.split("_")[0]
        shape = shapes.get(f"{prefix}_{port.dims}", shapes.get(port.dims))
        if port.dims == "t?":  # the tables' shape says whether there are positions
            if shape is not None:
                tensors[port.name] = numbers(*shape, dtype=D, seed=seed).abs().long()
        elif port.name not in absent and shape is not None:
            tensors[port.name] = numbers(*shape, dtype=D, seed=seed)
    if "dropout_mask" in tensors:
        tensors["dropout_mask"] = tensors["dropout_mask"] > -1
        options |= MASKED
    return Drawn(Form(op.name, options), tensors, len(row))


class Calls(TorchDispatchMode):
    """The calls of tilenorm's ops, those of backward passes among them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function.namespace == "tilenorm":
            self.seen.append((function, arguments))
        return function(*arguments, **(named or {}))


def parts_of(tensor, placement, ranks: int) -> list:
    """What each rank has of an argument, which may be no tensor."""
    if not isinstance(placement, Shard):
        return [tensor] * ranks
    parts = list(tensor.chunk(ranks, placement.dim))
    return parts + [tensor.narrow(placement.dim, 0, 0)] * (ranks - len(parts))


def wholes_of(parts: list[Tensor], placement) -> list[Tensor]:
    """What the ranks have together. Without a shard or a sum, each rank has all of it."""
    if isinstance(placement, Shard):
        return [torch.cat(parts, placement.dim)]
    return [sum(parts)] if isinstance(placement, Partial) else parts


def assert_alike(found: Tensor, expected: Tensor, told: str) -> None:
    torch.testing.assert_close(found, expected, msg=lambda message: f"{told}: {message}")


def assert_rules(function, arguments: tuple, ranks: int) -> int:
    """Assert that an op gives by each rule what it gives on one process. Returns how many rules
    cut a tensor. DTensor takes no rule that cuts a dimension of fewer elements than ranks.
    """
    name, cut = function._schema.name.partition("::")[2], 0
    expected = function(*arguments)
    for results, taken in strategies(KINDS[name], arguments):
        places = [*zip(arguments, taken, strict=False)]
        shards = [(t, p) for t, p in places if isinstance(p, Shard)]
        if any(t.shape[p.dim] < ranks for t, p in shards):
            continue
        cut += bool(shards)
        each = zip(*[parts_of(t, p, ranks) for t, p in places], strict=True)
        made = [function(*given) for given in each]
        made = made if isinstance(expected, tuple) else [(t,) for t in made]
        whole = expected if isinstance(expected, tuple) else (expected,)
        for other, placement, *parts in zip(whole, results, *made, strict=True):
            for found in wholes_of(parts, placement):
                assert_alike(found, other, f"{name}: {placement} from {taken}")
    return cut


def test_each_rule():
    """Each rule that the ops offer for a call is right, whichever of them DTensor takes."""
    rules = dict.fromkeys((*(op.name for op in SHARDED), *BACKWARD), 0)
    for i in range(300):
        draw = random.Random(f"rules {i}")
        given = drawn(draw)
        try:
            with Calls() as calls:
                step(given.form, given.tensors, asked=given.leaves, dims=given.dims)
            for function, arguments in calls.seen:
                name = function._schema.name.partition("::")[2]
                rules[name] += assert_rules(function, arguments, draw.choice((2, 3)))
        except Exception as error:
            shapes = {n: tuple(t.shape) for n, t in given.tensors.items()}
            raise AssertionError(f"draw {i}: {given.form}, {given.dims}, {shapes}") from error
    assert min(rules.values()) > 10, rules


@pytest.mark.parametrize("shape", [(48,), (1, 6, 8), (6, 1, 8)], ids=str)
def test_heads_that_lie_elsewhere_are_not_cut(shape):
    """An op takes a weight of any shape. One in which the input's shape does not end tells nothing
    of which dimension the heads are.
    """
    given = {"input": numbers(4, 6, 8, dtype=D), "weight": numbers(*shape, dtype=D)}
    arguments = op_arguments("rms_norm", given, 8)
    assert not assert_rules(torch.ops.tilenorm.rms_norm.default, arguments, 2)


@pytest.mark.parametrize("weight", [R, Shard(0)], ids=str)
@on_every_rank
def test_heads_of_rows_that_begin_with_a_size_of_1(weight):
    """Two ranks have half of the heads each: no collective where the weights are cut as the heads
    are, and the bits of one process.
    """
    name, heads = NAMES[0], [Shard(1)]
    given = case(RMS, 4, 6, 1, 32, dims=2, parameter_shape=(6, 1, 32))
    at = {"input": heads, "weight": [weight], "bias": [weight]}
    found, collectives = given.on(name, at, [heads])
    given.compare(found, given.alone())
    assert found["output"].placements == found["input"].placements == tuple(heads)
    if weight == Shard(0):
        assert not collectives and found["weight"].placements == (weight,)


@pytest.mark.parametrize("op", slow_but_first([op.name for op in SHARDED]))
@on_every_rank
def test_what_is_cut_alike_takes_no_collective(op):
    """By samples, or by tokens where no groups divide them: a tensor that has the dimension is cut
    in it, and others are whole.
    """
    name = NAMES[-1]
    tensors = tensors_of_op(op, D, (4, 8))
    tensors.pop("addend", None)  # no op takes it and a mask
    by_group = any(port.dims == "g n" for port in OPS[op].takes)
    # Positions choose rows of tables, which every rank has then.
    along = {"... n": (0, 1), "t k d": (0, 1), "g n": (0, None), "t?": (None, 0)}
    places = {port.name: along.get(port.dims, (None, None)) for port in OPS[op].takes}
    form = Form(op, MASKED if "dropout_mask" in tensors else {})
    leaves = [n for n, t in tensors.items() if n in {p.name for p in OPS[op].takes if p.grad}]
    dys = gradients_like(call(form, tensors))
    expected = step(form, tensors, dys, asked=leaves)
    for dims in product((None, 0) if by_group else (None, 0, 1), repeat=mesh(name).ndim):

        def cut(of: tuple, dims=dims) -> list:
            return [R if d is None or of[d] is None else Shard(of[d]) for d in dims]

        on_mesh = {n: placed(t, name, cut(places[n])) for n, t in tensors.items()}
        incoming = [placed(dy, name, cut((0, 1))) for dy in dys]
        found, collectives = counted(step, form, on_mesh, incoming, asked=leaves)
        assert not collectives, (dims, collectives)
        for n, result in found.items():
            assert_alike(result.full_tensor().cpu(), expected[n], f"{n}, {dims}")


def placements_of(draw: random.Random, tensor: Tensor, mesh_dims: int, most: int) -> list:
    """Placements of a tensor, cut in one of its first `most` dimensions, if it is cut."""
    choices = [R, *map(Shard, range(min(most, tensor.dim())))]
    if tensor.is_floating_point() and draw.random() < 0.2:
        choices.append(P)
    return [draw.choice(choices) for _ in range(mesh_dims)]


@pytest.mark.parametrize("name", slow_but_first(NAMES[::-1]))
@pytest.mark.parametrize("seed, number", [(0, 25), pytest.param(1, 80, marks=pytest.mark.slow)])
@on_every_rank
def test_drawn_calls(name, seed, number):
    """Outputs and gradients are those of one process, however the tensors are placed."""
    for i in range(number):
        draw = random.Random(f"ones {name} {seed} {i}")
        given, dims = drawn(draw), mesh(name).ndim
        asked = draw.sample(given.leaves, draw.randint(1, len(given.leaves)))
        how = {"asked": asked, "dims": given.dims}
        outputs = call(given.form, given.tensors, given.dims)
        dys = gradients_like(outputs)
        if len(dys) == 2 and "key" not in given.tensors and draw.random() < 0.4:
            # DTensor raises where it flattens rows that are cut unevenly. A gate by group has it
            # flatten the sum's gradient, where that comes alone.
            by_group = {"scale", "gate"} <= given.tensors.keys()
            first = by_group or draw.random() < 0.5
            dys = (dys[0], None) if first else (None, dys[1])
        every = given.tensors["input"].dim()
        # These ops refuse an input that is cut in a normalised dimension.
        if dys[0] is None and "input" not in asked:
            asked.append("input")  # the sum has a gradient for few others
        of_input = given.leading if given.form.op in NOT_OF_ROWS else every
        most = {"input": of_input, "key": of_input}
        at = {n: placements_of(draw, t, dims, most.get(n, every)) for n, t in given.tensors.items()}
        of_dys = [None if t is None else placements_of(draw, t, dims, every) for t in dys]
        try:
            expected = step(given.form, given.tensors, dys, **how)
            on_mesh = {n: placed(t, name, at[n]) for n, t in given.tensors.items()}
            incoming = [
                None if dy is None else placed(dy, name, p)
                for dy, p in zip(dys, of_dys, strict=True)
            ]
            found = step(given.form, on_mesh, incoming, **how)
            assert found.keys() >= expected.keys()
            for n, result in found.items():
                whole = result.full_tensor().cpu()
                # What the sum's gradient does not reach has none, or, of cut rows, zeros.
                other = expected.get(n, torch.zeros_like(whole))
                assert_alike(whole, other, f"{n} of {result.placements}")
        except Exception as error:
            shapes = {n: tuple(t.shape) for n, t in given.tensors.items()}
            told = f"draw {i} of seed {seed} on {name}: {given.form}, {given.dims}, {shapes}"
            raise AssertionError(f"{told}, {at}, {of_dys}") from error
