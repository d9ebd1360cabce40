"""The part of a large output head that drafts read: rows of likely tokens (as FR-Spec, arXiv 2502.14856).

A head of 150,000 tokens takes about as long as a third of a small draft model's layers. A tokenizer gives low ids to
what it merged first, which is frequent. So a draft reads the panels (csrc/linear.h) of the lowest ids, and those of
tokens that its texts had. Other tokens have the logit -infinity and are not drafted. The choice depends on committed
tokens alone, so any rule stays exact. A ratio rule's output also depends on the choice, and so on other requests: if
such a request has a seed, drafts read all.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from speculant.kernels import Draft, address
from speculant.models.base import Chain

LEAST_VOCABULARY = 2**16  # tokens; a smaller head is read whole
FIRST, MOST = 6, 3  # the lowest ids are a sixth of all panels, and a draft reads a third of them at most


class LikelyPanels:
    """Chooses panels of `height` tokens each. panels: those to read, which are distinct."""

    def __init__(self, vocab_size: int, height: int) -> None:
        whole = self._whole = -(-vocab_size // height)
        self._height, self._first, self._most = height, whole // FIRST, whole // MOST
        self._seen: dict[int, None] = {}  # panels of tokens of texts, the latest ones last
        self.panels = array("q", range(self._first))

    def choose(self, chains: Sequence[Chain], draft: Draft) -> None:
        """Let a draft read the panels, unless a ratio rule verifies a seeded request; first add the input tokens'."""
        for chain in chains:
            self.add(chain.input_tokens)
        is_read = all(chain.probs is None or chain.request.params.seed is None for chain in chains)
        draft.panels, draft.num_panels = address(self.panels) if is_read else None, len(self.panels)

    def add(self, tokens: Iterable[int]) -> None:
        """Add the panels of tokens, in place of those that were not seen for longest; a draft may lack some tokens."""
        for panel in {token // self._height for token in tokens}:
            if self._first <= panel < self._whole:
                if panel in self._seen:
                    del self._seen[panel]
                else:
                    self.panels.append(panel)
                self._seen[panel] = None
        if len(self.panels) > self._most:
            kept = [*self._seen][self._first - self._most :]
            self._seen = dict.fromkeys(kept)
            self.panels = array("q", [*range(self._first), *kept])
