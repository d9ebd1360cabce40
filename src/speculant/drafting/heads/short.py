"""Short output heads: a head predicts some of the target's tokens, by their rows of the target's output head.

The option `head_tokens` names a file of these tokens; the usual one is head_tokens.json in the head's folder. Both are
made by `speculant train head-tokens`. Reading the rows costs as much as a pass of the output head with a row for each
dimension of the hidden states.

A draft model may have a short output head too (FR-Spec, arXiv 2502.14856). A head of few rows is read faster. The
model's probabilities are renormalised over these tokens, and other tokens have probability 0: ratio rules stay exact.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculant.drafting.heads.folder import HeadFolder
from speculant.drafting.heads.future import OwnHeads
from speculant.errors import ConfigError, PairError
from speculant.kernels import soft_cap
from speculant.models import CausalLM, Described, linears_of, spread

KEY = "head_tokens"
FILE = f"{KEY}.json"
ROWS = "lm_head.weight"
_AT_A_TIME = 64  # dimensions


def save_head_tokens(path: Path, tokens: Sequence[int]) -> None:
    """Write the ids to a JSON file, in ascending order."""
    path.write_text(json.dumps({KEY: sorted(tokens)}) + "\n", encoding="utf-8")


def read_head_tokens(given: Any) -> tuple[int, ...]:
    """Read the option `head_tokens`: a file of `speculant train head-tokens`; None = all tokens. Raises ConfigError."""
    if given is None:
        return ()
    fix = 'make the file by `speculant train head-tokens` and set "head_tokens": "FILE.json".'
    if not isinstance(given, str | Path) or not str(given):
        raise ConfigError(f"head_tokens={given!r} names no file", fix)
    try:
        tokens = json.loads(Path(given).expanduser().read_text(encoding="utf-8"))[KEY]
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:  # RuntimeError: no such home, deep JSON
        raise ConfigError(f"{given} is no file of head tokens: {type(error).__name__}: {error}", fix) from None
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int and token >= 0 for token in tokens):
        raise ConfigError(f"{given} has no list of token ids", fix)
    return tuple(sorted(set(tokens)))


def short_tokens(given: Any, folder: HeadFolder, target: CausalLM) -> tuple[int, ...]:
    """Return the tokens that a head predicts, ascending; () = all. Raises ConfigError or PairError."""
    usual = folder.folder / FILE
    tokens = read_head_tokens(usual if given is None and usual.exists() else given)
    if tokens and tokens[-1] >= target.vocab_size:
        raise PairError(
            f"head_tokens has the token {tokens[-1]} and the target has {target.vocab_size}",
            "make the file with this target's tokenizer.",
        )
    return tokens


@torch.inference_mode()
def output_rows(target: CausalLM, tokens: Sequence[int]) -> Tensor:
    """Return the rows [n, hidden] of the target's output head, which are the logits of unit vectors.

    The rows include the head's factor. Its soft cap limits logits to tens, and hardly changes logits of unit vectors.
    Raises PairError for a target with a bias of logits.
    """
    of, index = target.cache_shape, torch.tensor(tokens)
    if target.logits(torch.zeros(1, target.hidden_size, dtype=of.dtype, device=of.device))[:, index].any():
        raise PairError("the target's logits have a bias, and short heads have none", "leave out head_tokens.")
    units = torch.eye(target.hidden_size, dtype=of.dtype, device=of.device)
    parts = (units[first : first + _AT_A_TIME] for first in range(0, target.hidden_size, _AT_A_TIME))
    return torch.cat([target.logits(part)[:, index] for part in parts]).T.to(of.dtype).contiguous()


def output_cap(target: CausalLM) -> float | None:
    """Return the soft cap of the target's logits; None = it has none."""
    return target.config.head.softcap if isinstance(target, Described) else None


def short_heads(target: CausalLM, tokens: Sequence[int]) -> OwnHeads:
    """Return the function that computes the logits of these tokens; all others have -inf."""
    rows, index = output_rows(target, tokens), torch.tensor(tokens, device=target.cache_shape.device)
    multiply, softcap = linears_of(target, [rows]), output_cap(target)

    def logits(states: Tensor) -> Tensor:
        products = multiply(states.flatten(0, 1)[None])[0].view(*states.shape[:2], -1)
        return spread_heads(soft_cap(products, softcap), index, target.vocab_size)

    return logits


def spread_heads(logits: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Return logits [k, r, vocab_size] from those [k, r, n] of the tokens [n]; all others are -inf."""
    return spread(logits.flatten(0, 1), tokens, vocab_size).view(*logits.shape[:2], -1)
