"""The instructions that move predicates, uniform registers and special registers."""

import numpy as np

from .instructions import instruction, is_predicate, is_uniform
from .machine import WARP


@instruction("P2R")
def from_predicates(m, i, mask):
    target, _, kept, chosen = i.operands
    chosen = m.integer(chosen)
    bits = sum(m.predicates[p].astype(np.uint32) << np.uint32(p) for p in range(7))
    m.set(target, m.integer(kept) & ~chosen | bits & chosen, mask)


@instruction("R2P")
def to_predicates(m, i, mask):
    _, source, chosen = i.operands
    source, chosen = m.integer(source), int(chosen, 16)
    for p in range(7):
        if chosen >> p & 1:
            m.set_predicate(f"P{p}", (source >> np.uint32(p) & np.uint32(1)).astype(bool), mask)


@instruction("R2UR")
def to_uniform(m, i, mask):
    target, source = i.operands[0], i.operands[-1]
    values = m.word(source, False).reshape(m.warps, WARP)
    active = mask.reshape(m.warps, WARP)
    first = values[np.arange(m.warps), active.argmax(1)]
    m.set(target, first, active.any(1))


@instruction("VOTEU", "VOTE")
def vote(m, i, mask):
    target, source = (o for o in i.operands if o not in ("RZ", "URZ"))
    values = m.predicate(source).reshape(m.warps, WARP)
    active = mask.reshape(m.warps, WARP)
    kind = i.modifiers[0]
    if not is_predicate(target):
        raise NotImplementedError(i.text)
    result = (values | ~active).all(1) if kind == "ALL" else (values & active).any(1)
    if i.name == "VOTE":
        m.set_predicate(target, np.repeat(result, WARP), mask)
    else:
        m.set_predicate(target, result, active.any(1))


@instruction("S2R", "S2UR", "CS2R")
def special(m, i, mask):
    target, name = i.operands
    uniform = is_uniform(i)
    if name == "SRZ":
        zero = np.zeros(m.threads, np.uint64)
        m.set(target, zero.astype(np.uint32), mask)
        if "32" not in i.modifiers:
            m.set(target, zero.astype(np.uint32), mask, 1)
        return
    count = m.warps if uniform else m.threads
    fixed = dict(zip(("SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z"), m.block, strict=True))
    fixed["SR_CgaCtaId"] = 0
    if name == "SR_TID.X":
        value = np.arange(count, dtype=np.uint32) * (WARP if uniform else 1)
    elif name == "SR_LANEID":
        value = np.arange(count, dtype=np.uint32) % WARP
    elif name in fixed:
        value = np.full(count, fixed[name], np.uint32)
    else:
        raise NotImplementedError(i.text)
    m.set(target, value.astype(np.uint32), mask)
