"""Heads draft the tokens that the modules of the `speculators` package predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from speculant import LLM
from speculant.drafting.heads.hidden import HiddenDrafter
from speculant.kernels.native import usable_sets
from speculant.params import SamplingParams
from speculant.types import DraftTree, Request
from tests.examples import examples
from tests.heads import write_eagle3
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Shape, write_checkpoint
from tests.speculators_heads import (
    make_dflash_module,
    make_module,
    make_mtp_module,
    predicted,
    predicted_at_masks,
    predicted_by_block,
    predicted_by_mtp,
    read_into,
)

KERNELS = ["reference", *(["native"] if usable_sets() else [])]
FLAGS = ["norm_before_residual", "norm_output", "norm_before_fc", "fc_norm"]
LENGTH = 4
TARGET_LAYERS = 7
USUAL = (2, 3, 4)  # 2, L // 2 and L - 3
CLOSE = 1e-4  # in float32
KNOWN = [token for token in range(VOCAB_SIZE) if token % 3]
PROMPTS = [[7, 1, 2, 3, 4, 1, 2, 250, 5, 1, 2], [9, 100, 101], [65, 66, 67, 68, 69, 70]]
NUM_TOKENS = examples(12, least=8)
PARAMS = [
    SamplingParams(temperature=0 if place == 0 else 1.0, max_tokens=NUM_TOKENS, ignore_eos=True) for place in range(3)
]


@dataclass(frozen=True)
class Target:
    """A target's folder, and the same weights in transformers."""

    folder: str
    theirs: PreTrainedModel

    @torch.inference_mode()
    def states(self, text: Sequence[int], layers: Sequence[int]) -> Tensor:
        """Return the inputs of layers, [len(text), 3 * hidden] for three; the one after the last is after the norm."""
        found = self.theirs(torch.tensor([text]), output_hidden_states=True).hidden_states
        return torch.cat([found[layer][0] for layer in layers], dim=-1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_checkpoint(tmp_path_factory.mktemp("speculators") / "target", Shape(layers=TARGET_LAYERS))
    return Target(folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@dataclass(frozen=True)
class Draft:
    """A draft, and the text that it continues."""

    seq_id: int
    text: list[int]
    tree: DraftTree
    greedy: bool


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """Return the drafts of all heads, as they are made."""
    seen, propose = list[Draft](), HiddenDrafter.propose

    def noting(self: HiddenDrafter, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        trees = propose(self, requests, limits)
        pairs = zip(requests, trees, strict=True)
        seen.extend(
            Draft(each.seq_id, list(each.tokens), tree, each.params.greedy) for each, tree in pairs if tree.size
        )
        return trees

    monkeypatch.setattr(HiddenDrafter, "propose", noting)
    return seen


def generate(target: Target, head: str, kernels: str, drafts: list[Draft], method: str = "eagle3") -> None:
    """Generate with a head: prompts in chunks, two sampled requests beside a greedy one."""
    config = {"method": method, "model": head, "num_speculative_tokens": LENGTH, "draft_length": "fixed"}
    common = {"dtype": "float32", "kernels": kernels, "draft_quantization": "none"}  # the package rounds no weights
    llm = LLM(target.folder, max_num_batched_tokens=16, speculative_config=config, **common)
    drafts.clear()  # of measurements
    llm.generate(PROMPTS, PARAMS)
    assert len({len(draft.text) for draft in drafts if draft.tree.size == LENGTH}) > 5


def deviation(target: Target, module: PreTrainedModel, layers: Sequence[int], drafts: Sequence[Draft]) -> float:
    """Return the largest difference between a log-probability and the module's; greedy drafts must be equal."""
    texts = {draft.seq_id: draft.text for draft in drafts}  # the last, which begin with the ones before
    states = {seq_id: target.states(text[:-1], layers) for seq_id, text in texts.items()}
    found = list[Tensor]()
    for draft in drafts:
        seen = states[draft.seq_id][: len(draft.text) - 1]
        if hasattr(module, "mtp_layers"):
            logits = predicted_by_mtp(module, target.theirs, seen, draft.text, draft.tree.token_list)
        elif hasattr(module, "block_size"):
            logits = predicted_by_block(module, seen, draft.text, draft.tree.size)
        elif hasattr(module, "mask_hidden"):
            logits = predicted_at_masks(module, seen, draft.text, draft.tree.size)
        else:
            logits = predicted(module, seen, draft.text, draft.tree.token_list)
        if draft.greedy:
            assert draft.tree.token_list == logits.argmax(-1).tolist()
        else:
            assert draft.tree.probs is not None
            expected = logits.double().log_softmax(-1)
            known = expected.isfinite()
            assert torch.equal(known, draft.tree.probs > 0)
            found.append((draft.tree.probs.log() - expected)[known].abs().max())
    return float(torch.stack(found).max())


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", [pytest.param("reference", marks=pytest.mark.slow), *KERNELS[1:]])
@pytest.mark.parametrize("input_norm", [None, "norm_before_fc", "fc_norm"])
@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("known", [None, KNOWN], ids=["all tokens", "d2t"])
@pytest.mark.parametrize("layers", [(0, 3, 6), None], ids=["own layers", "usual layers"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_heads_that_the_package_writes(
    tmp_path: Path, target: Target, drafts: list[Draft], family: str, layers: tuple[int, ...] | None,
    known: list[int] | None, norm_before_residual: bool, norm_output: bool, input_norm: str | None, kernels: str,
) -> None:  # fmt: skip
    flags = {"norm_before_residual": norm_before_residual, "norm_output": norm_output}
    flags |= {input_norm: True} if input_norm else {}
    module = make_module(family, VOCAB_SIZE, known, layers, **flags)
    module.save_pretrained(tmp_path / "head")
    generate(target, str(tmp_path / "head"), kernels, drafts)
    assert deviation(target, module, layers or USUAL, drafts) < CLOSE


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("output", ["the target's", "all tokens", "d2t"])
def test_heads_of_the_hub_draft_as_there(
    tmp_path: Path, target: Target, drafts: list[Draft], output: str, norm_before_residual: bool, kernels: str
) -> None:
    known = len(KNOWN) if output == "d2t" else None
    folder = write_eagle3(
        tmp_path / "head", HIDDEN_SIZE, VOCAB_SIZE, draft_vocab=known, own=output != "the target's",
        norm_before_residual=norm_before_residual, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
    )  # fmt: skip
    module = make_module("llama", VOCAB_SIZE, KNOWN if known else None, None, norm_before_residual=norm_before_residual)
    read_into(module, folder, target.theirs)
    generate(target, folder, kernels, drafts)
    assert deviation(target, module, (1, 3, 5), drafts) < CLOSE


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("flag", [None, *FLAGS])
@pytest.mark.parametrize("known", [None, KNOWN], ids=["all tokens", "d2t"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_heads_with_masks_that_the_package_writes(
    tmp_path: Path, target: Target, drafts: list[Draft], family: str, known: list[int] | None, flag: str | None,
    num_layers: int, kernels: str,
) -> None:  # fmt: skip
    flags = {flag: True} if flag else {}
    module = make_module(family, VOCAB_SIZE, known, USUAL, mask=9, num_layers=num_layers, **flags)
    module.save_pretrained(tmp_path / "head")
    generate(target, str(tmp_path / "head"), kernels, drafts, "peagle")
    assert deviation(target, module, USUAL, drafts) < CLOSE


BLOCKS: dict[str, dict[str, Any]] = {
    "masks alone predict": {"block_size": 6},
    "the newest token too": {"block_size": LENGTH, "sample_from_anchor": True},
    "causal in windows": {"block_size": LENGTH + 1, "windows": (5, None, 5)},
    "not causal in windows": {"block_size": LENGTH + 1, "windows": (None, 5), "sliding_window_non_causal": True},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("layers", [(1, 6), (0, 2, 4, 5)], ids=["two layers", "four layers"])
@pytest.mark.parametrize("known", [None, KNOWN], ids=["all tokens", "d2t"])
def test_heads_of_blocks_that_the_package_writes(
    tmp_path: Path, target: Target, drafts: list[Draft], known: list[int] | None, layers: tuple[int, ...], blocks: str,
    kernels: str,
) -> None:  # fmt: skip
    module = make_dflash_module(VOCAB_SIZE, known, layers, **BLOCKS[blocks])
    module.embed_tokens.weight.data = target.theirs.get_input_embeddings().weight
    if known is None:  # the file has neither
        module.lm_head.weight.data = target.theirs.get_output_embeddings().weight
    module.save_pretrained(tmp_path / "head")
    generate(target, str(tmp_path / "head"), kernels, drafts, "dflash")
    assert deviation(target, module, layers, drafts) < CLOSE


@pytest.mark.parametrize("kernels", [pytest.param("reference", marks=pytest.mark.slow), *KERNELS[1:]])
def test_windows_of_attention(tmp_path: Path, target: Target, drafts: list[Draft], kernels: str) -> None:
    """The first token of each draft: in training the window stays where it is while a draft grows."""
    module = make_module("qwen3", VOCAB_SIZE, None, USUAL, window=5)
    module.save_pretrained(tmp_path / "head")
    generate(target, str(tmp_path / "head"), kernels, drafts)
    first = [replace(draft, tree=first_node(draft.tree)) for draft in drafts]
    assert deviation(target, module, USUAL, first) < CLOSE


@pytest.mark.parametrize("kernels", KERNELS)
def test_multi_token_prediction(tmp_path: Path, target: Target, drafts: list[Draft], kernels: str) -> None:
    """transformers gives the states of the last layer after the final norm."""
    module = make_mtp_module(VOCAB_SIZE)
    module.save_pretrained(tmp_path / "head")
    generate(target, str(tmp_path / "head"), kernels, drafts, "mtp")
    assert deviation(target, module, [TARGET_LAYERS], drafts) < CLOSE


def first_node(chain: DraftTree) -> DraftTree:
    return DraftTree.chain(chain.token_list[:1], None if chain.probs is None else chain.probs[:1])


@pytest.mark.slow
def test_another_head_or_layer_differs(tmp_path: Path, target: Target, drafts: list[Draft]) -> None:
    """The comparison fails for a head of other arithmetic, and for states of other layers."""
    module = make_module("llama", VOCAB_SIZE, None, USUAL)
    module.save_pretrained(tmp_path / "head")
    generate(target, str(tmp_path / "head"), "reference", drafts)
    sampled = [draft for draft in drafts if not draft.greedy]
    assert deviation(target, module, USUAL, sampled) < CLOSE
    others = [make_module("llama", VOCAB_SIZE, None, USUAL, **{flag: True}) for flag in FLAGS]
    assert all(deviation(target, other, USUAL, sampled) > 0.1 for other in others)
    assert deviation(target, module, USUAL[::-1], sampled) > 0.1
