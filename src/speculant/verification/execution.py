"""Speculative execution outside of language models: two slow functions side by side (arXiv 2211.17192, section 6).

f returns a distribution over outcomes, and g runs on an outcome drawn from it. A cheap approximation of f's
distribution is known at once, so g starts on a draw from it while f runs. The draw is then verified as a drafted token
is: it is accepted with probability min(1, p / q), or replaced by a draw from norm((p - q)+), on which g runs again. The
outcome has exactly f's distribution, whatever the approximation is; a good one makes a second run of g rare.

    one after the other     f f f f f f g g g g
    side by side            f f f f f f
                            g g g g             and g once more with probability 1 - sum min(p, q)
"""

from __future__ import annotations

import math
import reprlib
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from speculant.errors import DistributionError
from speculant.sampling import Chance, Purpose, Stream
from speculant.verification.multi_draft import choose

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
Weights = Sequence[float] | Tensor  # one per outcome, [n]; any positive sum


@dataclass(frozen=True)
class Speculated(Generic[Result]):
    """g's result for an outcome of f's distribution; `accepted` = its run began before f had ended."""

    result: Result
    outcome: int
    accepted: bool


def speculate(
    f: Callable[[*Arguments], Weights],
    g: Callable[[int], Result],
    approximation: Callable[[*Arguments], Weights],
    *arguments: *Arguments,
    chance: Chance | None = None,
) -> Speculated[Result]:
    """Return g(outcome) for an outcome drawn from the distribution f(*arguments), g running in parallel where possible.

    f runs in the caller's thread, and g in another one, on an outcome that may be rejected: that run's result or error
    is ignored, so g should have no side effects. Both runs have ended when this returns or raises. They overlap only
    where they wait or release the GIL. chance None = fresh randomness; a `Stream` gives repeatable draws.

    Raises the errors of f, of the approximation and of g on the returned outcome, and DistributionError if weights are
    no distribution or the two differ in their number of outcomes.
    """
    source = Stream(secrets.randbits(64), (Purpose.ACCEPT, Purpose.DRAW), 0) if chance is None else chance
    q = _read_distribution("the approximation", approximation(*arguments))
    draft = source.draw(q)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="speculate") as pool:
        drafted = pool.submit(g, draft)
        p = _read_distribution("f", f(*arguments))
        if len(p) != len(q):
            raise DistributionError(
                f"f's distribution has {len(p)} outcomes and the approximation's has {len(q)}",
                "let both give a weight to every outcome, 0 where it is impossible.",
            )
        accepted, rest = choose(p, [draft], [q], source)
        if accepted is not None:
            return Speculated(drafted.result(), draft, accepted=True)
        outcome = source.draw(rest)
        return Speculated(g(outcome), outcome, accepted=False)


def _read_distribution(name: str, weights: Weights) -> Tensor:
    """Return weights as a distribution [n] in float64 on the CPU."""
    error = DistributionError(
        f"{name} gave {reprlib.repr(weights)}, which are not the weights of a distribution",
        "give one number from 0 for each outcome, with a positive and finite sum.",
    )
    try:
        token_probs = torch.as_tensor(weights).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise error from cause
    total = float(token_probs.sum())
    if token_probs.dim() != 1 or not bool((token_probs >= 0).all()) or not 0 < total < math.inf:
        raise error
    return token_probs / total
