"""Measures how many tokens a draft's short output head should keep (arXiv 2502.14856), by acceptance and time.

A head of n tokens draws from the draft's own distribution, renormalised over these tokens. So the acceptance of all
sizes is computed from the same drafts of the whole head. The time of a draft is measured with a head of each size.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speculant.cache.factory import slotted_cache
from speculant.config import EngineConfig
from speculant.drafting.base import Drafter
from speculant.drafting.heads.short import FILE, KEY, save_head_tokens
from speculant.engine.build import build_drafters, load_target, load_tokenizer, method_name
from speculant.engine.draft_loading import LEAST_GAIN, Precision, pass_seconds
from speculant.engine.head_precision import ROOM, DraftSample
from speculant.errors import ConfigError
from speculant.models.weights.load import Checkpoint

HALVINGS = 6  # sizes below the whole vocabulary
FEWEST = 32  # tokens of a head
SECONDS = 30.0  # for comparing drafts along the texts; the first one is always read


@dataclass(frozen=True)
class HeadSize:
    """A head of `size` tokens. coverage: their share of the counted tokens. speed: expected tokens per second.

    acceptance, token_s, draft_s: see `Precision`.
    """

    size: int
    coverage: float
    acceptance: float
    token_s: float
    draft_s: float
    speed: float


def sizes_of(vocab_size: int, least: int) -> list[int]:
    """Return the sizes to compare, the whole vocabulary first: each is half of the one before, and at least `least`."""
    found = [vocab_size >> halvings for halvings in range(HALVINGS + 1)]
    return [size for size in found if size >= max(least, FEWEST)] or [vocab_size]


def best_size(found: Sequence[HeadSize]) -> HeadSize:
    """Return the fastest head, among sizes of which the first one is the whole vocabulary.

    A shorter head must gain LEAST_GAIN over the whole one.
    """
    best = max(found, key=lambda each: each.speed)
    return best if best.speed > (1 + LEAST_GAIN) * found[0].speed else found[0]


def overlaps(p: Tensor, q: Tensor, order: Tensor, sizes: Sequence[int]) -> list[float]:
    """Return sum min(p, q_n) for each size n: q_n is q [V], renormalised over the first n tokens of `order` [V].

    A q_n without a possible token drafts nothing.
    """
    p, q = p.double()[order], q.double()[order]
    found = list[float]()
    for size in sizes:
        total = float(q[:size].sum())
        found.append(float(torch.minimum(p[:size], q[:size] / total).sum()) if total > 0 else 0.0)
    return found


def measure_sizes(
    config: EngineConfig,
    counts: NDArray[np.int64],
    order: Sequence[int],
    least: int,
    texts: Sequence[Sequence[int]],
    notify: Callable[[str], None] = lambda part: None,
) -> list[HeadSize]:
    """Measure heads of several sizes, the whole vocabulary first.

    config: names target, draft and method. counts [V]: of each token. order: all tokens, the most useful first; `least`
    of them are always kept. texts: like the target's outputs, of at least two tokens each. Raises ConfigError if there
    is none, or if the draft's folder already names the tokens of its head.
    """
    usual = Path(str(config.draft_model)).expanduser() / FILE
    if usual.exists():
        raise ConfigError(f"{usual} limits the head that is to be measured", "move it to another folder.")
    notify("Loading the models")
    target = load_target(config)
    sizes = sizes_of(len(order), least)
    notify("Measuring acceptance")
    samples = [text[: target.model.max_positions] for text in texts]
    if not samples:
        raise ConfigError("the files hold no two tokens in a row", "name files with text.")
    acceptance, sample = _acceptance(config, target, samples, order, sizes)
    pass_s, found = pass_seconds(target.model, []), list[HeadSize]()
    for size, own in zip(sizes, acceptance, strict=True):
        notify(f"Timing a head of {size} tokens")
        with torch.inference_mode():
            drafter = _drafter(config, target, order[:size] if size < len(order) else (), len(sample.tokens))
            token_s, draft_s = sample.seconds(drafter, [])
        speed = Precision(None, own, token_s, draft_s).speed(pass_s)
        coverage = float(counts[np.array(order[:size])].sum() / counts.sum())
        found.append(HeadSize(size, coverage, own, token_s, draft_s, speed))
    return found


@torch.inference_mode()
def _acceptance(
    config: EngineConfig, target: Checkpoint, texts: Sequence[Sequence[int]], order: Sequence[int], sizes: Sequence[int]
) -> tuple[list[float], DraftSample]:
    """Return the mean overlap by size, and the first text."""
    longest = max(map(len, texts))
    drafter, ordered, rows = _drafter(config, target, (), longest), torch.tensor(order), list[list[float]]()
    first, started = DraftSample.of(target, texts[0]), time.perf_counter()
    for place, text in enumerate(texts):
        sample = DraftSample.of(target, text) if place else first
        for tree, probs in sample.drafts(drafter):
            if tree.size and tree.probs is not None:
                rows.append(overlaps(probs, tree.probs[0], ordered, sizes))
            else:
                rows.append([0.0] * len(sizes))
        if time.perf_counter() - started > SECONDS:
            break
    return np.mean(rows, axis=0).tolist(), first


def _drafter(config: EngineConfig, target: Checkpoint, tokens: Sequence[int], longest: int) -> Drafter:
    """Build the drafter with a head of these tokens, () = all, for texts of up to `longest` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        options = dict(config.speculative_config or {})
        if tokens:
            options[KEY] = str(Path(folder) / FILE)
            save_head_tokens(Path(options[KEY]), tokens)
        spec = replace(config, speculative_config={**options, "draft_length": "fixed"}).speculative()
        assert spec is not None, "a draft is named"
        tokenizer = load_tokenizer(config, target.folder)
        length = 4 * longest + ROOM  # a draft of another tokenizer may read more tokens
        drafters, _ = build_drafters(config, spec, target, tokenizer, lambda shape: slotted_cache(shape, 1, length))
        return drafters.find(method_name(spec))
