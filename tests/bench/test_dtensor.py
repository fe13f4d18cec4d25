"""python -m bench dtensor: the host time of norms of DTensors."""

import torch.distributed as dist

from bench import dtensor
from bench.__main__ import main


def test_a_row_for_each_norm_direction_and_provider(monkeypatch, capsys):
    for name in ("CALLS", "WARM_UP"):
        monkeypatch.setattr(dtensor, name, 1)
    monkeypatch.setattr(dtensor, "SAMPLES", 3)
    assert main(["dtensor"]) == 0
    header, _, _, _, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("µs of CPU time a call, PyTorch ")
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    named = [(n, p, d) for n in dtensor.NORMS for d in dtensor.DIRECTIONS for p in dtensor.NORMS[n]]
    assert [tuple(row[:3]) for row in found] == named
    for _, _, _, plain, cut, share in found:
        assert int(plain) > 0 and int(cut) > 0 and abs(int(cut) - int(plain) - int(share)) <= 1
    assert not dist.is_initialized()
