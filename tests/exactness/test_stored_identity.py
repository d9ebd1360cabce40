"""Speculation changes no text of a checkpoint whose matrices have several quantised types, with any drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams, plugins
from speculant.kernels import usable_sets
from tests.drafters import FEW_METHODS, model_of, options_of, predicting
from tests.exactness.selection import slow_but
from tests.gguf_models import convert
from tests.models import VOCAB_SIZE, Shape, write_checkpoint
from tests.quantised_folders import (
    FLOAT8,
    INT4,
    INT8,
    LINEAR,
    Gptq,
    compressed,
    e4m3,
    edit_config,
    integers,
    packed,
    quantise,
)

pytestmark = [
    pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built"),
    pytest.mark.usefixtures("one_thread"),
]
DRAFTERS = plugins.names("speculant.drafting")
KINDS = {
    "token_embd": "Q8_0", "attn_q": "Q4_0", "attn_k": "Q5_1", "attn_v": "Q8_0", "ffn_up": "Q5_1", "ffn_down": "Q5_0",
}  # fmt: skip
HALVES = {"attn_k": "F16", "ffn_up": "BF16"}  # of the draft
GPTQ = Gptq(
    act_order=True,
    modules={"k_proj": {"act_order": False}, "v_proj": None, "up_proj": {"sym": True}, "down_proj": {"bits": 8}},
)
COMPRESSED = compressed(
    "mixed-precision",
    {"down_proj": e4m3(1, 0), "up_proj": e4m3(1, 0), "gate_proj": e4m3(0, 0), "o_proj": integers(8, 0), "v_proj": None,
     LINEAR: packed(4, 32, False), "lm_head": e4m3(0, 0)},
    {**INT4, "strategy": "group", "group_size": 32, "symmetric": False}, {**FLOAT8, "strategy": "channel"},
    {**INT8, "strategy": "channel"},
)  # fmt: skip
PROMPTS = [[70 + place, 71, 72 + place, 80, 71, 72] for place in range(6)]
PARAMS = {
    "greedy": [SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)] * len(PROMPTS),
    "seeded": [SamplingParams(temperature=0.7, seed=place, max_tokens=16, ignore_eos=True) for place in range(6)],
}


def plain_checkpoint(root: Path, hidden_size: int, noise: float, **shape: Any) -> Path:
    return Path(write_checkpoint(root / "plain", Shape(hidden_size=hidden_size, layers=3, noise=noise, **shape)))


def write_gguf(root: Path, hidden_size: int, noise: float) -> str:
    kinds = KINDS | HALVES if noise else KINDS
    source = str(plain_checkpoint(root, hidden_size, noise, tied=True))
    return str(convert(source, root / "model.gguf", lambda name: kinds.get(name.split(".")[-2], "Q4_1")))


def write_gptq(root: Path, hidden_size: int, noise: float) -> str:
    quantise(plain_checkpoint(root, hidden_size, noise), root / "packed", root / "numbers", GPTQ)
    edit_config(root / "packed", quantization_config={**GPTQ.config, "dynamic": {"-:.*v_proj": {}}})
    return str(root / "packed")


def write_compressed(root: Path, hidden_size: int, noise: float) -> str:
    source = plain_checkpoint(root, hidden_size, noise)
    quantise(source, root / "packed", root / "numbers", COMPRESSED)
    return str(root / "packed")


@dataclass(frozen=True)
class Format:
    """A way to store a model. types: of the target's matrices, as `LLM.kernels` names them."""

    hidden_size: int
    write: Callable[[Path, int, float], str]
    types: tuple[str, ...]


FORMATS = {
    "gguf": Format(256, write_gguf, ("q4_1 6 matrices", "q5_1 6", "q8_0 4", "q4_0 3")),
    "gptq": Format(64, write_gptq, ("zero4 12 matrices", "q4_0 3", "zero8 3")),
    "compressed-tensors": Format(160, write_compressed, ("fp8 10 matrices", "zero4 6", "int8 3")),  # 160: 1.25 blocks
}


@dataclass(frozen=True)
class Stored:
    """A target, and a draft that often agrees."""

    format: Format
    target: str
    draft: str

    def generate(
        self, params: list[SamplingParams], runs: int = 1, **arguments: Any
    ) -> tuple[list[list[int]], int, int]:
        """Return the texts of the last run, and how many tokens were drafted and accepted."""
        llm = LLM(self.target, max_model_len=64, **arguments)
        assert all(words in llm.kernels for words in self.format.types), llm.kernels
        outputs = [llm.generate(PROMPTS, params) for _ in range(runs)][-1]
        counted = [out.metrics.speculative_decoding for out in outputs]
        drafted, accepted = (
            sum(getattr(each, name) for each in counted) for name in ("num_draft_tokens", "num_accepted_draft_tokens")
        )
        return [list(out.outputs[0].token_ids) for out in outputs], drafted, accepted


@pytest.fixture(scope="module", params=FORMATS)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    form, root = FORMATS[request.param], tmp_path_factory.mktemp("stored")
    paths = (form.write(root / name, form.hidden_size, noise) for name, noise in (("target", 0.0), ("draft", 0.02)))
    return Stored(form, *paths)


@pytest.fixture(scope="module")
def plain(stored: Stored) -> dict[str, list[list[int]]]:
    """Return the texts without speculation, each alone."""
    off = {"use_speculative_decoding": False, "max_num_seqs": 1}
    found = {name: stored.generate(params, **off)[0] for name, params in PARAMS.items()}
    assert all(len({tuple(text) for text in texts}) > 3 for texts in found.values())
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("distribution", PARAMS)
@pytest.mark.parametrize("drafter", slow_but(FEW_METHODS, DRAFTERS))
def test_no_drafter_changes_a_text(
    drafter: str, distribution: str, stored: Stored, plain: dict[str, list[list[int]]]
) -> None:
    expected = plain[distribution]
    params = [predicting(drafter, each, text) for each, text in zip(PARAMS[distribution], expected, strict=True)]
    config = {"method": drafter, "num_speculative_tokens": 3, **options_of(drafter, VOCAB_SIZE, expected)}
    model = model_of(drafter, stored.draft, stored.format.hidden_size, VOCAB_SIZE)
    runs = 2 if plugins.load("speculant.drafting", drafter).METHOD.learns else 1
    texts, drafted, accepted = stored.generate(params, runs, draft_model=model, speculative_config=config)
    assert texts == expected
    assert drafted > 0
    assert accepted > 0 or model != stored.draft, "no draft was accepted: a weak test"
