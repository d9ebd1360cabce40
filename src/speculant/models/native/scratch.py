"""How much scratch memory the native kernels keep from pass to pass. It grows with the sizes of a pass, up to bounds.

buffers      the activations of each row                         models/native/program.py
tiles        each row, packed for a linear layer                 csrc/tiles.h
angles       cosines and sines of each position                  models/native/decoder.py
spans        softmaxes of each row, head and span of keys        csrc/attention.h; at most MOST_SPAN_BYTES
items        keys and softmaxes of one work item, per thread     csrc/attention.h
sampling     logits and probs of each row                        kernels/memory.py; at most MOST_BYTES
candidates   tokens that top-k, top-p and min-p choose from      csrc/probs.h, per thread
"""

from __future__ import annotations

from speculant.kernels.memory import MOST_BYTES
from speculant.models.config import DecoderConfig

REAL, DOUBLE, CANDIDATE = 4, 8, 16  # bytes
GROWTH = 2  # an array that grows takes up to twice its need
MOST_SPAN_BYTES = 2**26  # MOST_PARTIAL of csrc/attention.h
TILE, SPAN, BLOCK_ROWS, LANES = 64, 512, 8, 16  # of csrc/attention.h; LANES: of the widest set
MOST_SPLIT_BLOCKS = 4  # per thread, of a pass whose spans are computed in parallel


def scratch_bytes(config: DecoderConfig, threads: int, rows: int, positions: int) -> int:
    """Return the most bytes that passes of `rows` rows keep, over sequences of up to `positions` positions."""
    per_row = _buffer_row(config) + GROWTH * _widest(config)
    angles = _power(positions) * config.head_dim
    sampling = min(MOST_BYTES, GROWTH * rows * config.vocab_size * (REAL + DOUBLE))
    candidates = GROWTH * threads * config.vocab_size * CANDIDATE
    reals = _power(rows) * per_row + angles + threads * _item(config)
    return REAL * reals + _span_bytes(config, threads, rows, positions) + sampling + candidates


def _buffer_row(config: DecoderConfig) -> int:
    """Return the numbers that `Buffers` holds for a row."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return 2 * config.hidden_size + heads * config.head_dim + config.intermediate_size


def _widest(config: DecoderConfig) -> int:
    """Return the largest number of inputs of a linear layer."""
    return max(config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)


def _padded(config: DecoderConfig) -> int:
    return -(-config.head_dim // LANES) * LANES


def _item(config: DecoderConfig) -> int:
    """Return the numbers that a work item of attention holds: keys and values of a tile, two softmaxes per query."""
    padded, queries = _padded(config), BLOCK_ROWS * config.num_heads // config.num_kv_heads
    return _power(2 * TILE * padded) + _power(2 * queries * (padded + 2))


def _span_bytes(config: DecoderConfig, threads: int, rows: int, positions: int) -> int:
    spans, most_rows = -(-positions // SPAN), min(rows, MOST_SPLIT_BLOCKS * threads * BLOCK_ROWS)
    if spans <= 1:
        return 0
    return min(MOST_SPAN_BYTES, REAL * _power(most_rows * config.num_heads * spans * (_padded(config) + 2)))


def _power(count: int) -> int:
    """Return the least power of two that is not below a count, at least 256: rows and positions grow in such steps."""
    return max(256, 1 << (count - 1).bit_length())
