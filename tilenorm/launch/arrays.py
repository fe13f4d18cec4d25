"""The arrays that launches take: tensors, or descriptions of tensors.

Each kind has the names of the kernels' own (kernels/arrays.py) in their order, in lower case and as
table.py calls the roles. All are absent by default. A call leaves out those at the end that it has
none of: of ForwardArrays what is behind the slots, behind layer_scale or behind inner_mean.
"""

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import itemgetter
from typing import Any

from ..kernels import arrays
from ..table import DY, TERMS
from .calls import ABSENT


def _named(kind: type, *sums: str) -> Any:
    """A NamedTuple of the arrays that kernels take, and of what a column sum writes."""
    long = {"W": "weight", "B": "bias"}
    names = [long.get(field.name, field.name.lower()) for field in fields(kind)]
    return namedtuple(kind.__name__, [*names, *sums], defaults=[ABSENT] * (len(names) + len(sums)))


ForwardArrays = _named(arrays.ForwardArrays)
RopeForwardArrays = _named(arrays.RopeForwardArrays)
# dy is a tuple of the terms of dy. The two sums stay at the end, whatever a call leaves out.
SUMS = {"BackwardArrays": ("dw", "db"), "RopeBackwardArrays": ("dw", "dkey_weight")}
BackwardArrays = _named(arrays.BackwardArrays, *SUMS["BackwardArrays"])
RopeBackwardArrays = _named(arrays.RopeBackwardArrays, *SUMS["RopeBackwardArrays"])
MAIN_ARRAYS = itemgetter(slice(-2))  # what the kernel of a backward pass takes
_OF_GROUP_SUMS = ("weight", "bias", "mod_scale", "dscale", "dshift", "dmod_gate", "group_sums")
# The last arrays that a call may have, where it has none behind them.
_ENDS: dict[Any, tuple[str, ...]] = {
    ForwardArrays: ("slots", "layer_scale", "inner_mean"),
    BackwardArrays: ("slots", "layer_scale", "group_sums"),
}
# The arrays that are tuples of arrays, and the array without which such a tuple is absent.
_TUPLES: dict[Any, dict[str, tuple[tuple[str, ...], str]]] = {
    RopeForwardArrays: {
        "input": (("x", "weight", "y", "rstd"), "x"),
        "key": (("key", "key_weight", "key_y", "key_rstd"), "key"),
    },
    RopeBackwardArrays: {
        "input": (("x", "dy", "weight", "rstd", "dx"), "dy"),
        "key": (("key", "dsum", "key_weight", "key_rstd", "dkey"), "dsum"),
    },
}
_TERMS = (DY.role, *(port.role for port in TERMS))
_SHORT = {"weight": "w", "bias": "b", "mod_scale": "scale", "mod_shift": "shift"}


def name_of_gradient(role: str) -> str:
    """The array of the gradient of the tensor that has a role; y, written again, is none."""
    return role if role == "y" else f"d{_SHORT.get(role, role)}"


def selecting(kind: Any, places: Mapping[str, int]) -> Callable[[tuple], tuple]:
    """A function of tensors, behind which stands ABSENT, that selects the arrays of a launch.

    kind: one of the classes above. places: where each array that there is stands among the
    tensors, by its name; the terms of dy have the names of their ports.
    """
    sums = SUMS.get(kind.__name__, ())
    names = kind._fields[: len(kind._fields) - len(sums)]
    for end in _ENDS.get(kind, ()):
        short = names[: names.index(end) + 1]
        if not {*names} & {*places} - {*short}:
            names = short
            break
    tuples = {
        name: _tuple_at([places.get(of, -1) for of in names_of])
        for name, (names_of, needed) in _TUPLES.get(kind, {}).items()
        if needed in places
    }
    if kind is BackwardArrays:
        tuples["dy"] = _tuple_at([places[name] for name in _TERMS if name in places])
    offsets = {name: len(tuples) + place for name, place in places.items()}
    offsets |= {name: i for i, name in enumerate(tuples)}
    offsets |= dict.fromkeys(_TUPLES.get(kind, {}).keys() - tuples.keys(), -1)
    take = itemgetter(*[offsets.get(name, -1) for name in (*names, *sums)])
    if not tuples:
        return take
    takes = tuple(tuples.values())

    def take_with_tuples(tensors: tuple) -> tuple:
        return take((*[take_tuple(tensors) for take_tuple in takes], *tensors))

    return take_with_tuples


def _tuple_at(places: Sequence[int]) -> Callable[[tuple], tuple]:
    """A function that selects a tuple, also of one item."""
    if len(places) > 1:
        return itemgetter(*places)
    (place,) = places
    return lambda tensors: (tensors[place],)


def of_group_sums(every_array: tuple) -> tuple:
    """What the kernel takes, of BackwardArrays, that adds up the sums by group."""
    named = zip(BackwardArrays._fields, MAIN_ARRAYS(every_array), strict=False)
    return tuple([array if name in _OF_GROUP_SUMS else ABSENT for name, array in named])


def taking(kind: Any, *names: str) -> Callable[[tuple], Any]:
    """A function that selects the named arrays of a kind.

    It returns one array for one name, and a tuple for several.
    """
    places = {name: i for i, name in enumerate(kind._fields)}
    first_sum, second_sum = kind._fields[-2:]
    places |= {first_sum: -2, second_sum: -1}
    return itemgetter(*[places[name] for name in names])
