"""What the tests on several ranks share: tensors placed on a mesh, and what a call must give."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

import tilenorm
from tests.support.calls import Form, expected_of, incoming_of, step, tensors_of
from tests.support.tolerance import assert_close

from .world import device, mesh

warnings.simplefilter("ignore", tilenorm.ReferenceWarning)
COLLECTIVES = ("_c10d_functional", "_dtensor")  # the namespaces of their operators
SEND_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")  # operators there that are none
PARAMETERS = ("weight", "bias")
R, P = Replicate(), Partial()

Placements = Sequence[Placement]


def placed(tensor: Tensor, name: str, placements: Placements) -> DTensor:
    """A tensor, which every rank has, on the mesh of a name. Nothing is sent.

    Partial keeps it on the mesh dimension's first rank: the others have zeros to add.
    """
    on = mesh(name)
    whole = [R if p.is_partial() else p for p in placements]
    found = distribute_tensor(tensor.detach(), on, whole, src_data_rank=None)
    if whole == list(placements):
        return found
    coordinate, local = on.get_coordinate(), found.to_local()
    if any(p.is_partial() and c for p, c in zip(placements, coordinate, strict=True)):
        local = torch.zeros_like(local)
    shape, stride = tensor.shape, tensor.contiguous().stride()
    return DTensor.from_local(local, on, placements, shape=shape, stride=stride, run_check=False)


def counted(function: Callable, /, *arguments, **options):
    """A call's result, and how many collectives of each kind it takes, by the kind's name."""
    with CommDebugMode() as mode:
        result = function(*arguments, **options)
    counts = mode.get_comm_counts()
    return result, {str(kind).rsplit(".")[-1]: number for kind, number in counts.items() if number}


def profiled(function: Callable, /, *arguments, **options):
    """As counted, for compiled code, which does not run under a mode."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = function(*arguments, **options)
    names = [e.name.partition("::") for e in profiler.events()]
    kinds = Counter(kind for space, _, kind in names if space in COLLECTIVES)
    return result, {kind: n for kind, n in kinds.items() if kind not in SEND_NOTHING}


class Case(NamedTuple):
    """A call: a form, its tensors as one process has them, and its options."""

    form: Form
    tensors: dict[str, Tensor]
    dims: int = 1
    options: dict = {}  # noqa: RUF012

    @property
    def incoming(self) -> tuple[Tensor, ...]:
        """A gradient for each output."""
        return incoming_of(self.tensors, self.options.get("out_dtype"))

    @property
    def outputs(self) -> int:
        return len(self.incoming)

    def alone(self, asked=None, incoming=None) -> dict[str, Tensor]:
        """Outputs and gradients of one process."""
        how = {"dims": self.dims, **self.options}
        return step(self.form, self.tensors, incoming, asked, **how)

    def placed(self, name: str, placements: dict[str, Placements]) -> dict[str, DTensor]:
        """The tensors on a mesh, each in the placements of its name."""
        return {n: placed(t, name, placements[n]) for n, t in self.tensors.items()}

    def on(self, name: str, placements: dict[str, Placements], incoming, **how):
        """Outputs and gradients on a mesh, as DTensors, and the collectives that they took.

        incoming: the placements of each output's gradient, or None.
        """
        given = self.placed(name, placements)
        gradients = [
            p if p is None else placed(dy, name, p)
            for dy, p in zip(self.incoming, incoming, strict=True)
        ]
        how = {"dims": self.dims, **self.options, **how}
        return counted(step, self.form, given, gradients, **how)

    def compare(self, found: dict, expected: dict, incoming=None, exact=True) -> None:
        """Assert that what DTensors give is what one process gives: bit for bit, but where ranks
        add up their parts of a parameter's gradient, which are within the budget. The gradient of a
        skip is that of the output, placed as that is.

        incoming: as step takes them. exact: False has everything within the budget.
        """
        assert found.keys() == expected.keys()
        tensors = {n: t.cpu() for n, t in self.tensors.items()}
        truths = expected_of(self.form, tensors, incoming, self.dims, **self.options)
        for name, result in found.items():
            partial = any(p.is_partial() for p in result.placements)
            assert not partial or name in (*PARAMETERS, "skip"), f"{name} has {result.placements}"
            whole, other = result.full_tensor(), expected[name]
            assert (whole.shape, whole.dtype) == (other.shape, other.dtype), name
            if name != "skip" and (partial or not exact):
                assert_close(name, whole.cpu(), truths[name][0], other.cpu())
            else:
                assert torch.equal(whole, other), f"{name} of {result.placements} has other bits"


def case(form: Form, *shape: int, dims=1, parameter_shape=None, options=None, **made) -> Case:
    """A case of a form whose tensors are drawn in a shape."""
    parameter_shape = parameter_shape or shape[-dims:]
    tensors = tensors_of(form, *shape, parameter_shape=parameter_shape, device=device(), **made)
    return Case(form, tensors, dims, options or {})


def alike(given: Case, rows: Placements, parameters: Placements = (R,)) -> dict[str, Placements]:
    """One placement for all that has rows, and one for the parameters."""
    parameters = list(parameters) * (len(rows) // len(parameters))
    return {n: parameters if n in PARAMETERS else rows for n in given.tensors}
