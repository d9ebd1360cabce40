"""The text of a model of a real size is the same with and without speculation: bfloat16, on the native kernels.

Its weights are random, so its favourites lie close together and every difference of rounding would soon show. The draft
is its first layers, which agree with it now and then.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from speculant import LLM, SamplingParams, plugins
from speculant.kernels import usable_sets
from speculant.models import resolve_source
from tests.covering import covering
from tests.drafters import BLIND, HEADS, model_of, options_of, predicting

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built"),
]
CONFIG: dict[str, Any] = {
    "model_type": "llama", "dtype": "bfloat16", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 4096, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
DRAFT_LAYERS = 2
SCALES = {"embed_tokens": 1.0, "lm_head": 0.05, "o_proj": 0.01, "down_proj": 0.003}
LENGTHS = (3, 17, 64, 130, 31, 5, 90, 48)
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.3, "top_p": 0.9},
}
TOKENS = 20


@dataclass(frozen=True)
class Pair:
    """Folders of a target and its draft, and the target's plain text of every prompt, by distribution."""

    target: str
    draft: str
    plain: Mapping[str, list[list[int]]]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randint(32000, (length,), generator=generator).tolist() for length in LENGTHS]
    made[-1] = made[-1][:6] * 8  # something for n-grams
    return made


def texts(
    llm: LLM, distribution: str, drafter: str = "", plain: Sequence[Sequence[int]] = ((),) * len(LENGTHS)
) -> tuple[list[list[int]], int]:
    """Return the continuation of every prompt, and the number of drafted tokens that were accepted.

    plain: what will follow, for a drafter that reads predictions.
    """
    params = [
        SamplingParams(
            **DISTRIBUTIONS[distribution],
            seed=None if distribution == "greedy" else 70 + i,
            max_tokens=TOKENS,
            ignore_eos=True,
        )
        for i in range(len(LENGTHS))
    ]
    params = [predicting(drafter, each, text) for each, text in zip(params, plain, strict=True)]
    outputs = llm.generate(prompts(), params)
    accepted = sum(out.metrics.speculative_decoding.num_accepted_draft_tokens for out in outputs)
    return [out.outputs[0].token_ids for out in outputs], accepted


def weight(rows: int, columns: int, name: str) -> Tensor:
    scale = next((scale for part, scale in SCALES.items() if part in name), 0.02)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return (scale * torch.randn(rows, columns, generator=generator)).bfloat16()


def weights(num_layers: int) -> dict[str, Tensor]:
    hidden, inside, rows = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    shapes = {"model.embed_tokens": (rows, hidden), "lm_head": (rows, hidden)}
    for at in (f"model.layers.{layer}" for layer in range(num_layers)):
        shapes |= {
            f"{at}.self_attn.{name}_proj": (size, hidden)
            for name, size in zip("qkvo", (2048, 512, 512, 2048), strict=True)
        }
        shapes |= {f"{at}.mlp.{name}_proj": (inside, hidden) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj"] = hidden, inside
    made = {f"{name}.weight": weight(*shape, name) for name, shape in shapes.items()}
    norms = [f"model.layers.{i}.{name}_layernorm" for i in range(num_layers) for name in ("input", "post_attention")]
    return made | {f"{name}.weight": torch.ones(hidden).bfloat16() for name in ("model.norm", *norms)}


def write_model(folder: Path, num_layers: int) -> str:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_source("demo", "target") / name, folder / name)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": num_layers}))
    save_file(weights(num_layers), folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("scale")
    target = write_model(folder / "target", CONFIG["num_hidden_layers"])
    llm = LLM(target, dtype="bfloat16", kernels="native", max_num_seqs=1, max_model_len=256, weight_packing="plain")
    plain = {distribution: texts(llm, distribution)[0] for distribution in DISTRIBUTIONS}
    assert plain["greedy"] != plain["seeded"]
    return Pair(target, write_model(folder / "draft", DRAFT_LAYERS), plain)


ENGINES: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "eight": {"max_num_seqs": 8, "max_num_batched_tokens": 61},
    "slotted, small chunks": {"max_num_seqs": 3, "max_num_batched_tokens": 24, "kv_cache_backend": "slotted"},
    "weights in 12 bits": {"max_num_seqs": 8, "weight_packing": "12bit"},
}
PRODUCT = [{"engine": engine, "drafter": name} for engine in ENGINES for name in plugins.names("speculant.drafting")]
ONCE = [tuple(PRODUCT[index].values()) for index in covering(PRODUCT, 1)]  # each drafter with one engine
SIZES = (CONFIG["hidden_size"], CONFIG["vocab_size"])
EVERYWHERE = [(engine, drafter) for engine in ENGINES for drafter in (None, "draft_model")]


@pytest.mark.parametrize(("engine", "drafter"), sorted({*ONCE, *EVERYWHERE}, key=str))
def test_text_is_identical_on_a_model_of_half_a_billion_weights(pair: Pair, engine: str, drafter: str | None) -> None:
    method = plugins.load("speculant.drafting", drafter).METHOD if drafter else None
    known = [text for plain in pair.plain.values() for text in plain]
    own = options_of(drafter, CONFIG["vocab_size"], known) if drafter else {}
    drafting = {"method": drafter, "num_speculative_tokens": 4, **own} if drafter else None
    llm = LLM(
        pair.target, draft_model=model_of(drafter, pair.draft, *SIZES) if drafter else None, dtype="bfloat16",
        kernels="native", max_model_len=256, speculative_config=drafting, **ENGINES[engine],
    )  # fmt: skip
    accepted = 0
    for distribution, plain in pair.plain.items():
        if method and method.learns:
            assert texts(llm, distribution)[0] == plain
        seen, kept = texts(llm, distribution, drafter or "", plain)
        assert seen == plain, distribution
        accepted += kept
    assert accepted > 0 or method is None or drafter in {*BLIND, *HEADS}, (
        "nothing was ever accepted, so nothing was shown"
    )
