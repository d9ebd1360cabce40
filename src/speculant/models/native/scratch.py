"""How much scratch memory the native kernels keep from pass to pass. It grows with the sizes of a pass, up to bounds.

buffers      the activations of each row                         models/native/program.py
tiles        each row, packed for a linear layer                 csrc/tiles.h
own rows     a pass's only row, normed and packed, per thread    csrc/program.h
angles       cosines and sines of each position                  models/native/angles.py
spans        softmaxes of each row, head and span of keys        csrc/attention.h; at most MOST_SPAN_BYTES
items        keys and softmaxes of one work item, per thread     csrc/attention.h
sampling     logits and probs of each row                        kernels/memory.py; at most MOST_BYTES
candidates   tokens that top-k, top-p and min-p choose from      csrc/probs.h, per thread
"""

from __future__ import annotations

from speculant.kernels import MOST_BYTES
from speculant.models.description import Attention
from speculant.models.native.packed import PackedDecoder
from speculant.models.reference.rotary import rotations

# Arrays whose rows are packed; `results` is as wide as what experts gather.
READ = ("x", "heads", "gated", "results", "inputs")
REAL, DOUBLE, CANDIDATE = 4, 8, 16  # bytes
GROWTH = 2  # an array that grows takes up to twice its need
MOST_SPAN_BYTES = 2**24  # MOST_PARTIAL of csrc/attention.h
TILE, SPAN, MOST_BLOCK_REALS, LANES = 64, 512, 2**14, 16  # of csrc/attention.h; LANES: of the widest set


def scratch_bytes(packed: PackedDecoder, threads: int, rows: int, positions: int) -> int:
    """Return the most bytes that passes of `rows` rows keep, over sequences of up to `positions` positions."""
    config, widths = packed.config, packed.activations
    widest = max(widths.get(name, 0) for name in READ)
    per_row = sum(widths.values()) + GROWTH * widest
    tables = 1 if config.restart_at is None else 2
    angles = tables * _power(positions) * sum(rotation.dims or 0 for rotation in rotations(config))
    sampling = min(MOST_BYTES, GROWTH * rows * config.vocab_size * (REAL + DOUBLE))
    candidates = GROWTH * threads * config.vocab_size * CANDIDATE
    kinds = config.attentions
    reals = _power(rows) * per_row + angles + threads * (max(map(_item, kinds)) + 2 * GROWTH * widest)
    spans = max(_span_bytes(of, threads, rows, positions) for of in kinds)
    return REAL * reals + spans + sampling + candidates


def _padded(of: Attention) -> int:
    return -(-of.head_dim // LANES) * LANES


def _item(of: Attention) -> int:
    """Return the numbers that a work item of attention holds: keys and values of a tile, two softmaxes per query."""
    padded = _padded(of)
    return _power(2 * TILE * padded) + _power(2 * max(MOST_BLOCK_REALS, of.groups * (padded + 2)))


def _span_bytes(of: Attention, threads: int, rows: int, positions: int) -> int:
    spans = -(-positions // SPAN)
    if spans <= 1 or threads == 1:
        return 0
    return min(MOST_SPAN_BYTES, REAL * _power(rows * of.heads * spans * (_padded(of) + 2)))


def _power(count: int) -> int:
    """Return the least power of two, from 256 up, that is not below a count: rows and positions grow in such steps."""
    return max(256, 1 << (count - 1).bit_length())
