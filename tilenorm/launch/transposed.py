"""The launches of kernels/transposed.py."""

from typing import Any, NamedTuple

from ..kernels.transposed import GROUP, transposed
from ..spec import NormSpec
from .calls import ABSENT, Launch, constants, rectangles
from .config import Hints, cdiv
from .kernel import hinted
from .plan import plan_forward
from .target import Target

# Four blocks of 128 threads fill a multiprocessor's registers, and read 64 KiB of 16-bit rows at
# once. With 5 some dtypes spill. No GPU has measured it.
TRANSPOSED = hinted(transposed, Hints(occupancy=4))
TILE = 64  # columns of a block: 128 bytes of a 16-bit row


class TransposedArrays(NamedTuple):
    """What the kernel reads and writes, in the order of transposed.Arrays."""

    x: Any
    weight: Any = ABSENT
    bias: Any = ABSENT
    mean: Any = ABSENT
    rstd: Any = ABSENT
    q: Any = ABSENT
    scale: Any = ABSENT


def transposed_launches(
    spec: NormSpec, target: Target, rows: int, normalized: bool
) -> list[Launch]:
    """Of the arrays of a spec whose `quantized` names the dtype of q.

    normalized: what is transposed is the normalised rows, and not x itself.
    """
    norm = constants(plan_forward(spec, target, False).norm(False))
    blocks = cdiv(rows, GROUP) * cdiv(spec.hidden, TILE)
    after = (rows, norm, normalized, TILE)
    return [
        Launch(TRANSPOSED, (1, y, z), (first, y), tuple, after)
        for first, y, z in rectangles(blocks)
    ]
