"""The arrays that launches take: tensors, or descriptions of tensors.

Each kind has the names of the kernels' own (kernels/arrays.py) in their order, in lower case and as
table.py calls the roles. All are absent by default. A call leaves out those at the end that it has
none of: of ForwardArrays what is behind the slots, behind layer_scale or behind inner_mean.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import fields
from operator import itemgetter
from typing import Any

from ..kernels import arrays
from .calls import ABSENT


def _named(kind: type, *sums: str) -> Any:
    """A NamedTuple of the arrays that kernels take, and of what a column sum writes."""
    long = {"W": "weight", "B": "bias"}
    names = [long.get(field.name, field.name.lower()) for field in fields(kind)]
    return namedtuple(kind.__name__, [*names, *sums], defaults=[ABSENT] * (len(names) + len(sums)))


ForwardArrays = _named(arrays.ForwardArrays)
RopeForwardArrays = _named(arrays.RopeForwardArrays)
# dy is a tuple of the terms of dy. The two sums stay at the end, whatever a call leaves out.
BackwardArrays = _named(arrays.BackwardArrays, "dw", "db")
RopeBackwardArrays = _named(arrays.RopeBackwardArrays, "dw", "dkey_weight")
MAIN_ARRAYS = itemgetter(slice(-2))  # what the kernel of a backward pass takes
_OF_GROUP_SUMS = ("weight", "bias", "mod_scale", "dscale", "dshift", "dmod_gate", "group_sums")


def of_group_sums(given: tuple) -> tuple:
    """What the kernel takes, of BackwardArrays, that adds up the sums by group."""
    named = zip(BackwardArrays._fields, MAIN_ARRAYS(given), strict=False)
    return tuple([array if name in _OF_GROUP_SUMS else ABSENT for name, array in named])


def taking(kind: Any, *names: str) -> Callable[[tuple], Any]:
    """A function that selects the named arrays of a kind.

    It returns one array for one name, and a tuple for several.
    """
    places, last = {name: i for i, name in enumerate(kind._fields)}, kind._fields[-2:]
    places |= {last[0]: -2, last[1]: -1}
    return itemgetter(*[places[name] for name in names])
