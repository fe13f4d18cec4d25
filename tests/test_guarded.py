"""The allocator with guard bytes finds what is written outside, and what is not written."""

import pytest
import torch

from tests.support.guarded import GUARD, guarded
from tilenorm.ops.passes import cutile


def allocated(*shape: int, dtype=torch.float32):
    return cutile._empty_strided_cpu(shape, (shape[1], 1), dtype)


@pytest.mark.parametrize("offset", [-1, 6, GUARD // 4 + 5])
def test_a_write_outside_is_found(offset):
    side = "before" if offset < 0 else "after"
    with (
        pytest.raises(AssertionError, match=f"4 of {GUARD} bytes {side} a tensor of 24"),
        guarded(),
    ):
        tensor = allocated(2, 3)
        start = tensor.storage_offset() + offset
        tensor.as_strided((1,), (1,), start).fill_(0)


def test_writes_inside_are_allowed_and_the_rest_is_nan():
    with guarded():
        tensor = allocated(2, 3)
        assert tensor.isnan().all() and tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        tensor.fill_(1)
        allocated(0, 3).fill_(1)
        allocated(2, 3, dtype=torch.int32).fill_(1)
