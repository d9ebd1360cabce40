"""States of the target that wait for a head's next draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculant.drafting.heads.hidden import Pending


def test_waiting_states_are_encoded_when_they_are_read() -> None:
    """A head without drafts costs no encoding; encoded states are not encoded again."""
    encoded = list[int]()

    def encode(layers: Sequence[Tensor]) -> Tensor:
        encoded.append(len(layers[0]))
        return layers[0] + 10 * layers[1]

    pending, rows = Pending(encode), torch.arange(5.0)[:, None]
    for first, end in ((0, 1), (1, 2), (2, 4)):
        pending.add((rows[first:end], torch.ones(end - first, 1)), end - first)
    assert (pending.count, encoded) == (4, [])
    assert pending.read().flatten().tolist() == [10, 11, 12, 13]
    pending.drop(3)
    pending.add((rows[4:], torch.ones(1, 1)), 1)
    assert pending.read().flatten().tolist() == [13, 14]
    assert (pending.count, encoded) == (2, [4, 1])
