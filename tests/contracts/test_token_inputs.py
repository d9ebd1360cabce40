"""Layers with inputs by token: rows that bring an embedding of their own have those of token 0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speculant.kernels import usable_sets
from speculant.models import SequenceInput, build_batch
from speculant.types import DraftTree
from tests.unit.models.families import Pair, Session, make_pair, random_tokens

BACKENDS = ["reference", *(["native"] if usable_sets() else [])]
TREE = DraftTree.of([3, 17, 9, 40, 5], [-1, -1, 1, 1, 3])
NO_TOKEN = 10**9  # what a row with an embedding of its own may have for a token
TOKENS, ROWS = random_tokens(12), [0, 3, 11]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    pair = make_pair(tmp_path_factory.mktemp("checkpoint"), "gemma4_text", "shared")
    return {"reference": pair, **({"native": pair.on_native()} if usable_sets() else {})}


def logits(pair: Pair, given: Tensor | None = None) -> Tensor:
    """Return the logits of a prompt and a tree; given: embeddings of the rows ROWS, which then have no tokens."""
    if given is None:
        return Session(pair.ours).feed(SequenceInput(0, TOKENS, TREE))
    tokens = [NO_TOKEN if row in ROWS else token for row, token in enumerate(TOKENS)]
    return Session(pair.ours).feed(SequenceInput(0, tokens, TREE, dict(zip(ROWS, given, strict=True))))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_embedding_of_token_0_stands_for_it(made: dict[str, Pair], backend: str) -> None:
    pair = made[backend]
    zeros = [0 if row in ROWS else token for row, token in enumerate(TOKENS)]
    expected = Session(pair.ours).feed(SequenceInput(0, zeros, TREE))
    assert torch.equal(logits(pair, pair.ours.embed(torch.zeros(3, dtype=torch.int64))), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_embeddings_have_the_inputs_of_token_0(made: dict[str, Pair], backend: str) -> None:
    """As in transformers, given the inputs of such tokens."""
    pair, reference = made[backend], made["reference"].theirs
    tokens = torch.tensor([TOKENS])
    zeros = tokens.index_fill(1, torch.tensor(ROWS), 0)
    with torch.inference_mode():
        embedded = reference.get_input_embeddings()(tokens)
        inputs = reference.model.get_per_layer_inputs(zeros)
        expected = reference(inputs_embeds=embedded, per_layer_inputs=inputs).logits[0]
    found = logits(pair, pair.ours.embed(tokens[0, ROWS]))[:12]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert (found - logits(pair)[:12]).abs().max() > 0.1, "the inputs of their tokens are other ones"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_layers_have_their_own_inputs(made: dict[str, Pair], backend: str) -> None:
    """A model of the first layers reads the same tables."""
    pair = made[backend]
    ours = pair.ours.truncated(5)  # type: ignore[attr-defined]
    given, cache = SequenceInput(0, TOKENS, TREE), Session(pair.ours).cache
    with torch.inference_mode():
        states = pair.ours.forward(build_batch([given], cache, torch.device("cpu")), cache.storage, (5,))
        norm = made["reference"].ours.model.norm  # type: ignore[attr-defined]
        expected = pair.ours.logits(norm(states.taps[0].float()))
    torch.testing.assert_close(Session(ours).feed(given), expected, atol=1e-4, rtol=0)
