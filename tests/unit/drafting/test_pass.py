"""PaSS: drafts from look-ahead rows of the target's pass, compared with passes that are written out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculant import LLM
from speculant.drafting import (
    Drafter,
    DrafterNeeds,
    LookAheadTree,
    Proposals,
    StatelessDrafter,
    propose_checked,
)
from speculant.errors import ConfigError, DraftError, PairError
from speculant.kernels import usable_sets
from speculant.models import CausalLM, load_model
from speculant.params import SamplingParams
from speculant.tree import depths_of
from speculant.types import CommittedRows, DraftTree, Request
from tests.heads import Shown, fresh_ahead, fresh_states, write_head, write_pass
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Checkpoints, make_request
from tests.unit.drafting.test_heads import build

H, V = HIDDEN_SIZE, VOCAB_SIZE
TEXT = [7, 1, 2, 3, 4, 1, 2, 250, 5, 1, 2]
LOOK_AHEAD = [40, 50, 60]
GREEDY = SamplingParams(temperature=0, max_tokens=None)
KERNELS = ["reference", *(["native"] if usable_sets() else [])]
PROMPTS = ["def read(path):", "import os", "hello world " * 4]


def write_inputs(folder: Path, inputs: Tensor) -> str:
    config = {"num_look_ahead": len(inputs), "hidden_size": H, "vocab_size": V, "speculant_head": "pass"}
    return write_head(folder, config, {"look_ahead.weight": inputs})


def tokens_as_inputs(folder: Path, target: CausalLM) -> str:
    """Write look-ahead embeddings that are those of tokens, so that their rows are those of a text."""
    return write_inputs(folder, target.embed(torch.tensor(LOOK_AHEAD)).float())


def unshown(drafter: Drafter) -> Drafter:
    assert isinstance(drafter, Shown)
    return drafter.drafter


@pytest.mark.parametrize("kernels", KERNELS)
@torch.inference_mode()
def test_drafts_are_the_targets_predictions(tmp_path: Path, checkpoints: Checkpoints, kernels: str) -> None:
    """With embeddings of tokens, the t-th draft is the target's prediction after t of these tokens."""
    target = load_model(checkpoints.target, "float32", kernels=kernels).model
    drafter = build("pass", tokens_as_inputs(tmp_path / "head", target), target)
    (states,) = fresh_states(target, [*TEXT[:-1], *LOOK_AHEAD], (target.num_layers + 1,))
    expected = target.logits(states[-3:])
    request = make_request(TEXT, params=GREEDY)
    drafter.begin(request)
    assert drafter.propose([request], [3])[0].token_list == expected.argmax(-1).tolist()
    sampled = make_request(TEXT, params=SamplingParams(max_tokens=None), seq_id=2, shared_noise=False)
    drafter.begin(sampled)
    (tree,) = drafter.propose([sampled], [3])
    assert tree.probs is not None
    torch.testing.assert_close(tree.probs, expected.softmax(-1).double(), atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_rows_are_added_before_there_is_a_draft(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """Without states a draft has rows and no nodes; with fewer states than it may have nodes, it has as many."""
    target = load_model(checkpoints.target, "float32").model
    drafter = unshown(build("pass", write_pass(tmp_path / "head", H, V), target))
    request = make_request(TEXT, params=GREEDY)
    drafter.begin(request)
    (tree,) = drafter.propose([request], [2])
    assert (tree.size, len(ahead_of(tree)), tree.num_rows) == (0, 2, 2)
    assert drafter.propose([request], [0])[0].num_rows == 0
    states = fresh_ahead(target, TEXT[:-1], ahead_of(tree))
    known = torch.cat((states.new_zeros(len(TEXT) - 1, H), states))
    drafter.observe(request, CommittedRows(0, TEXT[:-1], (), (known,)))
    (tree,) = drafter.propose([request], [3])
    assert (tree.size, len(ahead_of(tree)), tree.num_rows) == (2, 3, 2 + 3 * 3)
    drafter.observe(request, CommittedRows(len(TEXT) - 1, TEXT[-1:], (), (known[:1],)))
    assert drafter.propose([request], [3])[0].size == 0, "the pass had no rows of its own"


def ahead_of(tree: DraftTree) -> Tensor:
    assert isinstance(tree, LookAheadTree)
    return tree.inputs


def test_look_ahead_rows_are_chains_below_each_node() -> None:
    """Nodes first, then the chain of the root, of node 0, and so on."""
    tree = LookAheadTree.around(DraftTree.of([5, 6, 7], [-1, -1, 1]), torch.zeros(2, 4))
    whole, inputs = tree.pass_rows()
    assert (len(inputs), tree.num_rows, whole.size) == (8, 11, 11)
    assert whole.parent_list == [-1, -1, 1, -1, 3, 0, 5, 1, 7, 2, 9]
    assert depths_of(whole.parent_list) == [1, 1, 2, 1, 2, 2, 3, 2, 3, 3, 4]
    assert whole.token_list[:3] == [5, 6, 7]
    assert tree.size == 3, "look-ahead rows are no nodes"
    assert tree.first(1).num_rows == 1 + 2 * 2
    assert (tree.observed([]), tree.observed([1, 2])) == ((3, 4), (1, 2, 9, 10))
    alone = LookAheadTree.around(DraftTree.empty(), torch.zeros(2, 4))
    assert alone.pass_rows()[0].parent_list == [-1, 0]
    assert DraftTree.empty().num_rows == 0, "the empty draft is shared and stays empty"


@pytest.mark.parametrize(
    "kernels", [pytest.param(each, marks=[] if each == KERNELS[-1] else pytest.mark.slow) for each in KERNELS]
)
@pytest.mark.parametrize("cache", [pytest.param("paged", marks=pytest.mark.slow), "slotted"])
def test_texts_are_those_of_plain_decoding(tmp_path: Path, checkpoints: Checkpoints, cache: str, kernels: str) -> None:
    """Greedy and seeded, to the end of the context, where there is less and less room for look-ahead rows."""
    common = {"dtype": "float32", "kernels": kernels, "max_model_len": 72, "kv_cache_backend": cache}
    target = load_model(checkpoints.target, "float32", kernels=kernels).model
    config = {"method": "pass", "model": tokens_as_inputs(tmp_path / "head", target), "num_speculative_tokens": 3}
    plain = LLM(checkpoints.target, use_speculative_decoding=False, **common)
    drafting = LLM(checkpoints.target, speculative_config=config, **common)
    for params in (GREEDY, SamplingParams(temperature=0.8, seed=5, max_tokens=None)):
        expected, found = (llm.generate(PROMPTS, params) for llm in (plain, drafting))
        assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
        assert sum(each.metrics.speculative_decoding.num_draft_tokens for each in found) > 0


def test_one_pass_drafts_and_verifies(
    tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target runs once per step, and every step after the first ones has a draft."""
    target = load_model(checkpoints.target, "float32").model
    head = tokens_as_inputs(tmp_path / "head", target)
    llm = LLM(
        checkpoints.target, dtype="float32", kernels="reference",
        speculative_config={"method": "pass", "model": head, "num_speculative_tokens": 2},
    )  # fmt: skip
    rows, forward = list[int](), type(target).forward

    def counting(self: CausalLM, batch: object, *arguments: object) -> object:
        rows.append(len(batch.tokens))  # type: ignore[attr-defined]
        return forward(self, batch, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(target), "forward", counting)
    (output,) = llm.generate(["hello"], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    steps = output.metrics.timing.target_passes
    assert len(rows) == steps
    assert output.metrics.speculative_decoding.num_spec_steps >= steps - 3
    assert rows[1] == 1 + 2, "the first pass behind the prompt: a token, and rows for two"
    assert rows[2] == 1 + 2 + 3 * 2, "then a token, its draft of two, and two rows below each of the three"


def test_it_is_refused_within_other_methods(tmp_path: Path, checkpoints: Checkpoints) -> None:
    head = write_pass(tmp_path / "head", H, V)
    config = {"method": "merge", "model": head, "members": ["ngram", "pass"]}
    with pytest.raises(ConfigError, match="can't be used within another method"):
        LLM(checkpoints.target, speculative_config=config)


def test_embeddings_of_another_target_are_refused(tmp_path: Path, checkpoints: Checkpoints) -> None:
    for name, hidden, vocab in (("wide", 2 * H, V), ("other", H, V + 1)):
        config = {"method": "pass", "model": write_pass(tmp_path / name, hidden, vocab)}
        with pytest.raises(PairError, match="was made for"):
            LLM(checkpoints.target, speculative_config=config)


class Overdoing(StatelessDrafter):
    needs = DrafterNeeds(target_inputs=2)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        return [LookAheadTree.around(DraftTree.empty(), torch.zeros(2, 4)) for _ in requests]


def test_more_look_ahead_rows_than_allowed_are_refused() -> None:
    request = make_request(TEXT, params=GREEDY)
    drafts = Proposals()
    propose_checked(Overdoing(), [request], [2], V, drafts)
    assert drafts[request.seq_id].num_rows == 2
    with pytest.raises(DraftError, match="1 are allowed"):
        propose_checked(Overdoing(), [request], [1], V, drafts)
    for wrong in (torch.zeros(0, 4), torch.zeros(4), torch.zeros(3, 4)):
        with pytest.raises(DraftError, match="look-ahead rows of shape"):
            LookAheadTree.around(DraftTree.empty(), wrong).check_rows(2)
