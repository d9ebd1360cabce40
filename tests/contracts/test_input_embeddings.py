"""A row may bring its own input embedding: a token's embedding gives the bits of the token, in any batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from speculant.cache.storage import paged_cache
from speculant.errors import RequestError
from speculant.lab.exactness.tables import TableModel
from speculant.models.base import CausalLM, SequenceInput, build_batch
from speculant.types import DraftTree
from tests.small_models import MODELS, NATIVE, make_model
from tests.unit.models.families import random_tokens

PROMPTS = {1: random_tokens(9, seed=1), 2: random_tokens(21, seed=2), 3: random_tokens(5, seed=3)}
TREE = DraftTree.of([3, 17, 9, 40, 5], [-1, -1, 1, 1, 3])
NO_TOKEN = 10**9  # what a row with an embedding of its own may have for a token
REFERENCE = "reference-float64"
ROUNDED = {"int8": 0.005, "int4": 0.005}  # of the largest number: both keep the table in 8 bits here

Embeddings = Mapping[int, Tensor]


class Session:
    """A model with a cache that is fed step by step."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.cache = paged_cache(model.cache_shape, 64, 5)

    @torch.inference_mode()
    def feed(self, *feeds: SequenceInput) -> Tensor:
        """Run one pass; return the logits of all rows."""
        batch = build_batch(feeds, self.cache, torch.device("cpu"))
        return self.model.logits(self.model.forward(batch, self.cache.storage).last)


def embedded(model: CausalLM, feed: SequenceInput, rows: Sequence[int]) -> SequenceInput:
    """Return a feed in which some rows bring the embeddings of their tokens, and have none themselves."""
    tokens = [*feed.tokens, *feed.tree.token_list]
    found = model.embed(torch.tensor([tokens[row] for row in rows], dtype=torch.int64))
    for row in rows:
        tokens[row] = NO_TOKEN
    tree = DraftTree.of(tokens[len(feed.tokens) :], feed.tree.parent_list)
    return SequenceInput(feed.seq_id, tokens[: len(feed.tokens)], tree, dict(zip(rows, found, strict=True)))


def alone(model: CausalLM, embeddings: Embeddings) -> Tensor:
    return Session(model).feed(SequenceInput(2, PROMPTS[2], DraftTree.empty(), embeddings))


@pytest.mark.parametrize("name", [*MODELS, "reference-bfloat16"])
def test_embeddings_of_tokens_have_the_tokens_bits(name: str) -> None:
    """All rows, some, or none of a sequence; prompts, chunks and trees, side by side; and what follows them."""
    model = make_model(name)
    feeds = [SequenceInput(seq_id, prompt, TREE) for seq_id, prompt in PROMPTS.items()]
    rows = {1: [0, 3, 8], 2: list(range(26)), 3: [5, 9]}  # 3: nodes of its tree alone
    plain, own = Session(model), Session(model)
    expected = plain.feed(*feeds)
    assert torch.equal(own.feed(*(embedded(model, feed, rows[feed.seq_id]) for feed in feeds)), expected)
    chunk = SequenceInput(2, [7, 8, 9], DraftTree.empty())
    for session in (plain, own):
        session.cache.compact(2, 21, (1, 3))
        session.cache.release(1)
    assert torch.equal(own.feed(embedded(model, chunk, [1])), plain.feed(chunk))


@pytest.mark.parametrize("name", [*MODELS, "reference-bfloat16"])
def test_embed_is_what_enters_the_first_layer(name: str) -> None:
    model = make_model(name)
    tokens = torch.tensor([0, 95, 3, 3, 61])
    cache = paged_cache(model.cache_shape, 64, 5)
    batch = build_batch([SequenceInput(0, tokens.tolist(), DraftTree.empty())], cache, torch.device("cpu"))
    with torch.inference_mode():
        seen = model.embed(tokens)
        assert torch.equal(model.forward(batch, cache.storage, (0,)).taps[0], seen)
    assert seen.shape == (5, model.hidden_size)
    assert torch.equal(model.embed(tokens[:0]), seen[:0])
    assert torch.equal(model.embed(tokens.int()), seen)
    assert torch.equal(model.embed(tokens[::2]), seen[::2])
    expected = make_model(REFERENCE).embed(tokens).to(model.cache_shape.dtype).double()
    most = next((error for type_, error in ROUNDED.items() if name.endswith(type_)), 0.0)
    torch.testing.assert_close(seen.double(), expected, atol=most * float(expected.abs().max()), rtol=0)


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_vector_is_an_input_embedding(dtype: torch.dtype) -> None:
    """Vectors that are no token's change what follows them alone, in the same way on both backends."""
    native = make_model(next(name for name in MODELS if name.endswith("-float32")))
    generator = torch.Generator().manual_seed(3)
    vectors = {row: torch.randn(64, generator=generator).to(dtype)[::2] for row in (4, 5, 11)}
    seen, plain = alone(native, vectors), alone(native, {})
    torch.testing.assert_close(seen.double(), alone(make_model(REFERENCE), vectors), atol=1e-4, rtol=0)
    assert torch.equal(seen[:4], plain[:4])
    assert not bool((seen[4:] == plain[4:]).all(-1).any())


def test_a_table_model_takes_one_hot_embeddings() -> None:
    model = TableModel(lambda history: [float(hash((history, token)) % 97) for token in range(4)], 4)
    feed = SequenceInput(1, [2, 0, 3], DraftTree.of([1, 2], [-1, -1]))
    expected = Session(model).feed(feed)
    assert torch.equal(Session(model).feed(embedded(model, feed, [1, 4])), expected)
    with pytest.raises(AssertionError, match="not a token's"):
        Session(model).feed(SequenceInput(1, [2, 0, 3], DraftTree.empty(), {1: torch.full((4,), 0.25)}))


@pytest.mark.parametrize("name", [REFERENCE, *(pytest.param(name, marks=NATIVE) for name in MODELS[1:2])])
@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        ({21: torch.ones(32)}, "row 21 of sequence 2, which has 21 rows"),
        ({-1: torch.ones(32)}, "row -1"),
        ({0: torch.ones(31)}, r"\[31\], and the model's are \[32\]"),
        ({0: torch.ones(1, 32)}, r"\[1, 32\], and the model's are \[32\]"),
        ({0: torch.ones(32), 1: torch.ones(16)}, "different shapes"),
    ],
)
def test_an_embedding_that_does_not_fit_is_refused(name: str, embeddings: Embeddings, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        alone(make_model(name), embeddings)


@pytest.mark.parametrize("name", [REFERENCE, *(pytest.param(name, marks=NATIVE) for name in MODELS[1:2])])
@pytest.mark.parametrize("token", [-1, 96, NO_TOKEN])
def test_a_token_without_an_embedding_is_refused(name: str, token: int) -> None:
    with pytest.raises(RequestError, match=f"token {token} has no input embedding"):
        make_model(name).embed(torch.tensor([3, token]))
