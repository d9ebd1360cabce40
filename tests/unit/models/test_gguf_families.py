"""Every family is read from GGUF files as from its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from speculant import plugins
from speculant.errors import ModelError
from speculant.gguf_file import GgufFile
from speculant.kernels import usable_sets
from speculant.models import (
    FAMILIES,
    CheckpointFiles,
    DecoderConfig,
    Number,
    QuantizedBlocks,
    Truth,
    gguf_families,
    load_model,
    read_gguf_config,
    read_gguf_decoder,
    read_plain,
)
from tests.gguf_models import convert
from tests.unit.models.families import (
    CONV,
    DELTA,
    EXPERTS,
    FAVOURED,
    FULL,
    LINEAR,
    MAMBA,
    MULTIPLIED,
    PADDED,
    SCALED,
    SHARED,
    T5,
    VARIANTS,
    Pair,
    Session,
    make_pair,
)
from tests.unit.models.test_gguf_models import same_as_decoded

GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.05, 1.3, 1.5],
    "long_factor": [1.0, 2.5, 7.0, 20.0],
}
INNER = {"intermediate_size": 128}  # in transformers' GPT-2, it is 4 times the width
WITHOUT = {  # families that GGUF files can't hold
    **dict.fromkeys(("opt", "bart", "mbart", "marian"), "llama.cpp has no architecture for it"),
    "gpt_oss": "its experts are not read from GGUF files yet",
    "gemma4_text": "sizes that differ from layer to layer are not read from GGUF files yet",
    "mt5": "its files are those of t5",
}
# What the files can hold of each family; other settings are lost in them.
STORED: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        **{name: VARIANTS["llama"][name] for name in ("llama2", "llama3", "llama3.2", "linear", "biases")},
        "yarn": {"rope_parameters": YARN},
    },
    "mistral": {"v0.3": {"sliding_window": None}, "nemo": {"sliding_window": None, "head_dim": 12}},
    "qwen2": {"plain": {}, "yarn": {"tie_word_embeddings": True, "rope_parameters": {**YARN, "beta_fast": 8.0}}},
    "qwen3": {"plain": {"head_dim": 16}, "tied": {"head_dim": 8, "tie_word_embeddings": True}},
    "qwen3_5_text": {name: VARIANTS["qwen3_5_text"][name] for name in ("plain", "one to one")}
    | {
        "tied": {**DELTA, "tie_word_embeddings": True, "linear_num_value_heads": 6, "full_attention_interval": 3},
        "listed": {**DELTA, "layer_types": [FULL, LINEAR, LINEAR]},
    },
    "qwen3_5_moe_text": {
        "plain": {
            **DELTA,
            **SHARED,
            "linear_num_value_heads": 6,
            "shared_expert_intermediate_size": 100,
            "full_attention_interval": 2,
            "num_hidden_layers": 2,
        },
        "tied": {**DELTA, **SHARED, "tie_word_embeddings": True, "full_attention_interval": 3, "num_experts": 5},
    },
    "qwen3_next": {
        "plain": VARIANTS["qwen3_next"]["plain"],
        "tied": {
            **DELTA,
            **SHARED,
            "tie_word_embeddings": True,
            "linear_num_value_heads": 2,
            "norm_topk_prob": False,
            "full_attention_interval": 3,
        },
    },
    "lfm2_moe": {
        "plain": VARIANTS["lfm2_moe"]["plain"],
        "scaled": {
            **FAVOURED,
            "layer_types": [FULL, CONV, FULL],
            "num_dense_layers": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
        },
    },
    "lfm2": {
        "plain": VARIANTS["lfm2"]["plain"],
        "untied": {**VARIANTS["lfm2"]["untied"], "block_auto_adjust_ff_dim": False},
    },
    "gemma2": {
        "plain": {**GEMMA, "sliding_window": 6},
        "other caps": {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    },
    "gemma3_text": {
        "plain": {**GEMMA, "sliding_window": 6, "num_hidden_layers": 7},
        "capped": {**GEMMA, "sliding_window": 6, "final_logit_softcapping": 5.0, "num_key_value_heads": 1},
        "scaled": {**GEMMA, "sliding_window": 6, "num_hidden_layers": 6, "rope_local_base_freq": 100.0, **SCALED},
    },
    "phi3": {
        "plain": {**PADDED, "sliding_window": None},
        "mini": {**PADDED, "sliding_window": 6, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
        "one key": {**PADDED, "num_key_value_heads": 1},
        "long": {**PADDED, "original_max_position_embeddings": 16, "rope_parameters": LONGROPE},
        "phi-4-mini": {
            **PADDED,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {**LONGROPE, "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 9.0]},
        },
    },
    "smollm3": {
        "plain": {**PADDED, "num_hidden_layers": 5},
        "untied": {**PADDED, "num_hidden_layers": 4, "tie_word_embeddings": False, "num_key_value_heads": 4},
    },
    "granite": {
        "plain": {**PADDED, **MULTIPLIED},
        "tied": {**PADDED, **MULTIPLIED, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    },
    "granitemoehybrid": {
        "plain": VARIANTS["granitemoehybrid"]["plain"],
        "groups": {
            **MAMBA,
            "layer_types": [FULL, LINEAR, LINEAR],
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        "rotated": VARIANTS["granitemoehybrid"]["rotated"],
        "experts": VARIANTS["granitemoehybrid"]["experts"],
        "dense": {**MAMBA, **MULTIPLIED, "layer_types": [FULL] * 3, "position_embedding_type": "rope"},
    },
    "cohere": {"plain": {**PADDED, "logit_scale": 0.7}, "one key": {**PADDED, "num_key_value_heads": 1}},
    "olmo2": {"plain": {}, "tied": {"num_key_value_heads": 4, "tie_word_embeddings": True}},
    "olmo3": {
        "plain": {"sliding_window": 6, "num_hidden_layers": 5},
        "yarn": {"sliding_window": 6, "num_hidden_layers": 4, "rope_scaling": {**YARN, "attention_factor": 1.3}},
        "listed": {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    },
    "ministral3": {"plain": {"head_dim": 8}, "tied": {"head_dim": 12, "tie_word_embeddings": True}},
    "starcoder2": {
        "plain": {},
        "untied": {"use_bias": False, "tie_word_embeddings": False, "num_key_value_heads": 1},
    },
    "qwen3_moe": {
        "plain": {**EXPERTS, "moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True},
        "tied": {
            **EXPERTS,
            "moe_intermediate_size": 64,
            "head_dim": 8,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    },
    "mixtral": {  # "all": rounded activations select no other experts
        "all": {"num_local_experts": 2},
        "three": {"num_local_experts": 5, "num_experts_per_tok": 3},
    },
    "olmoe": {"plain": {**PADDED, **EXPERTS}, "one key": {**PADDED, **EXPERTS, "num_key_value_heads": 1}},
    "gpt2": {"plain": INNER, "untied": {**INNER, "tie_word_embeddings": False, "n_head": 2}},
    "gpt_neox": {
        "pythia": {},
        "serial": {"use_parallel_residual": False, "rotary_pct": 1.0, "tie_word_embeddings": True},
        "unbiased": {"attention_bias": False, "rotary_pct": 0.5},
    },
    "t5": {
        "flan": {**T5, "feed_forward_proj": "gated-gelu", "layer_norm_epsilon": 1e-5},
        "v1.0": {**T5, "num_decoder_layers": 2, "relative_attention_num_buckets": 16},
    },
    "umt5": {"plain": T5, "more": {**T5, "num_decoder_layers": 4}},
}
pytestmark = pytest.mark.usefixtures("families_are_looked_up_once")
QUICK = (
    "llama",
    "gemma2",
    "olmoe",
    "gpt2",
    "t5",
)  # unlike each other, for tests that need no more of them in `make test`
CASES = [(family, variant) for family, variants in STORED.items() for variant in variants]
FIRST = [(family, next(iter(variants))) for family, variants in STORED.items()]
FIRST_ARE_QUICK = [pytest.param(*case, marks=[] if case in FIRST else pytest.mark.slow) for case in CASES]
FEW_ARE_QUICK = [pytest.param(*case, marks=[] if case[0] in QUICK else pytest.mark.slow) for case in FIRST]
WIDE = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "num_hidden_layers": 2,
    "vocab_size": 96,
}
HYBRID = {"linear_value_head_dim": 64, "full_attention_interval": 2}
WIDE_SHARED = {
    **HYBRID,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 256,
    "num_experts": 2,  # all are used: rounded activations select no other ones
}
WIDE_OWN: dict[str, dict[str, Any]] = {
    **{family: {"d_kv": 64, "d_ff": 256, "num_layers": 2} for family in ("t5", "umt5")},
    "gpt2": {"intermediate_size": 1024},
    **{family: {"layer_types": [CONV, FULL]} for family in ("lfm2", "lfm2_moe")},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": WIDE_SHARED,
    "qwen3_next": WIDE_SHARED,
    "granitemoehybrid": {"layer_types": [LINEAR, FULL], "shared_intermediate_size": 256},
}
UNCHECKED = {"attention.temperature_scale": (1e-40,), "rope.scaling.original_context_length": (1e-40, 1e39)}
RECURRENT = "attention.recurrent_layers"
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
TOKENS = [token % 61 for token in range(40, 72)]


def pair_of(folder: Path, family: str, variant: str, **settings: Any) -> Pair:
    """Make a checkpoint with settings of STORED."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VARIANTS, family, {variant: {**STORED[family][variant], **settings}})
        return make_pair(folder, family, variant)


class Files:
    """Makes each case's checkpoint once, and its file."""

    def __init__(self, root: Path, kind: str | Callable[[str], str], settings: dict[str, Any]) -> None:
        self._root, self._kind, self._settings = root, kind, settings
        self._made: dict[tuple[str, str], tuple[Pair, Path]] = {}

    def __getitem__(self, case: tuple[str, str]) -> tuple[Pair, Path]:
        if case not in self._made:
            family, variant = case
            own = WIDE_OWN.get(family, {})
            settings = {**self._settings, "intermediate_size": 256, **own} if self._settings else {}
            pair = pair_of(self._root / "-".join(case), family, variant, **settings)
            if self._settings:
                calm(pair.folder / "model.safetensors")
            self._made[case] = pair, convert(pair.folder, self._root / f"{'-'.join(case)}.gguf", self._kind)
        return self._made[case]


def calm(file: Path) -> None:
    """Make matrices smaller, so that attention is not nearly a choice of one position, which rounding can change."""
    tensors = load_file(file)
    save_file({name: each * (0.3 if each.dim() == 2 else 1) for name, each in tensors.items()}, file, {"format": "pt"})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("families"), "F32", {})


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Files with blocks, which are of up to 256 weights of a row."""
    return Files(tmp_path_factory.mktemp("wide"), kind_of, WIDE)


def test_each_family_is_tested_or_has_a_reason() -> None:
    assert gguf_families().keys() == STORED.keys()
    assert set(plugins.names(FAMILIES)) - STORED.keys() == WITHOUT.keys()


def differences(own: Any, other: Any, place: str = "") -> list[str]:
    """Return where two descriptions differ; files store numbers in float32."""
    if is_dataclass(own) and type(own) is type(other):
        return [
            each
            for field in fields(own)
            for each in differences(getattr(own, field.name), getattr(other, field.name), f"{place}.{field.name}")
        ]
    if isinstance(own, tuple) and isinstance(other, tuple) and len(own) == len(other):
        pairs = enumerate(zip(own, other, strict=True))
        return [found for index, each in pairs for found in differences(*each, f"{place}[{index}]")]
    numbers = isinstance(own, int | float) and isinstance(other, int | float)
    same = math.isclose(own, other, rel_tol=1e-6) if numbers else own == other
    return [] if same else [f"{place}: {own} and {other}"]


@pytest.mark.parametrize(("family", "variant"), FIRST_ARE_QUICK)
def test_descriptions_are_equal(files: Files, family: str, variant: str) -> None:
    pair, path = files[family, variant]
    own, other = (CheckpointFiles.open(place).decoder for place in (path, pair.folder))
    assert differences(own, replace(other, tensors=own.tensors)) == []


def test_a_linear_factor_extends_the_context_once(files: Files) -> None:
    pair, path = files["llama", "linear"]
    assert [CheckpointFiles.open(place).decoder.max_positions for place in (path, pair.folder)] == [512, 512]


@pytest.mark.parametrize(("family", "variant"), FIRST_ARE_QUICK)
def test_logits_are_equal(files: Files, family: str, variant: str) -> None:
    pair, path = files[family, variant]
    own = Session(load_model(str(path), kernels="reference").model).extend(TOKENS)
    torch.testing.assert_close(own, Session(pair.ours).extend(TOKENS), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own, pair.reference(TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "layers"), [("gemma2", 46), pytest.param("gemma3_text", 62, marks=pytest.mark.slow)]
)
def test_the_largest_gemma_has_another_scale_of_scores(tmp_path: Path, family: str, layers: int) -> None:
    """Its files do not say so."""
    width = {"hidden_size": 48, "head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 6}
    pair = pair_of(tmp_path / "source", family, "plain", **width, num_hidden_layers=layers)
    own = CheckpointFiles.open(convert(pair.folder, tmp_path / "model.gguf")).decoder
    assert {layer.attention.scale for layer in own.layers} == {12**-0.5}


# --- kinds of weights


def kind_of(name: str) -> str:
    """Return a kind for a tensor of a file: as various as those of Q4_K_M, where rows of one tensor are of one kind."""
    kinds = {
        "token_embd": "Q8_0",
        "position_embd": "F32",
        "attn_rel_b": "F16",
        "attn_q": "Q5_0",
        "attn_v": "Q6_K",
        "ffn_down": "Q4_0",
    }
    return kinds.get(name.split(".")[-2], "Q4_K")


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize(("family", "variant"), FEW_ARE_QUICK)
def test_blocks_are_those_of_the_gguf_package(
    wide: Files, tmp_path: Path, family: str, variant: str, kernels: str
) -> None:
    pair, path = wide[family, variant]
    same_as_decoded(path, pair.folder, tmp_path / "decoded", kernels)


@pytest.mark.parametrize("family", ["llama", "qwen2", "granite", "qwen3_5_text"])
def test_fused_queries_keys_and_values_are_read_in_any_family(files: Files, tmp_path: Path, family: str) -> None:
    """llama.cpp's conversion has an option for it."""
    pair, path = files[family, next(iter(STORED[family]))]
    fused = convert(pair.folder, tmp_path / "model.gguf", fused=True)
    assert not any("attn_q." in name for name in GgufFile.open(fused).tensors)
    own, other = (load_model(str(each), kernels="reference").model for each in (fused, path))
    assert torch.equal(Session(own).extend(TOKENS), Session(other).extend(TOKENS))


# --- layers with a state


def test_a_state_s_heads_stay_in_blocks_or_get_an_order(wide: Files, tmp_path: Path) -> None:
    """Heads have 64 columns of the last projection: blocks of 32 move with them, and those of 256 hold four heads."""
    pair, name = wide["qwen3_5_text", "plain"][0], "model.layers.0.linear_attn.out_proj.weight"
    plain = read_plain(CheckpointFiles.open(pair.folder).weights, name)
    for kind, has_order in (("F16", False), ("Q8_0", False), ("Q4_K", True)):
        weights = CheckpointFiles.open(convert(pair.folder, tmp_path / f"{kind}.gguf", kind)).weights
        found, order = weights.read(name), weights.order(name)
        assert (order is not None, isinstance(found, QuantizedBlocks)) == (has_order, kind != "F16")
        assert weights.kind(name) == kind
        assert not has_order or (isinstance(found, QuantizedBlocks) and found.order is not None)
        torch.testing.assert_close(
            read_plain(weights, name).float(), plain, rtol=0, atol=0.1 * float(plain.abs().max())
        )


def test_an_interval_tells_layers_with_a_state_in_older_files(files: Files) -> None:
    file = opened(files, "qwen3_5_text")
    assert described(file, {RECURRENT: None}) == described(file)


def test_heads_behind_the_layers_are_left_unread(files: Files, tmp_path: Path) -> None:
    pair, path = files["qwen3_5_text", "plain"]
    extra = {
        "blk.3.nextn.eh_proj.weight": np.ones((32, 64), np.float32),
        "blk.3.attn_norm.weight": np.ones(32, np.float32),
    }
    recurrent = {f"qwen35.{RECURRENT}": [True, True, False, False]}
    entries = {"qwen35.block_count": 4, "qwen35.nextn_predict_layers": 1, **recurrent}
    both = convert(pair.folder, tmp_path / "model.gguf", metadata=entries, extra=extra)
    own, other = (load_model(str(each), kernels="reference").model for each in (both, path))
    assert torch.equal(Session(own).extend(TOKENS), Session(other).extend(TOKENS))


@pytest.mark.parametrize(
    ("family", "entries", "words"),
    [
        ("qwen3_5_text", {"nextn_predict_layers": 3}, r"nextn_predict_layers = 3, not a whole number from 1 to 2"),
        ("qwen3_5_text", {RECURRENT: None, "full_attention_interval": 9}, "3 layers without attention"),
        ("qwen3_5_text", {RECURRENT: None, "full_attention_interval": 0}, "full_attention_interval = 0"),
        ("qwen3_5_text", {RECURRENT: [True] * 3}, "3 layers without attention"),
        ("qwen3_5_text", {RECURRENT: [True, False]}, "not true or false for each of 3 layers"),
        ("qwen3_5_text", {RECURRENT: [1, 0, 0]}, "not true or false for each of 3 layers"),
        ("qwen3_5_text", {RECURRENT: True}, "recurrent_layers = True"),
        ("qwen3_5_text", {"ssm.group_count": 3}, "4 heads for 3 keys"),
        ("qwen3_5_text", {"ssm.inner_size": 3}, "linear_value_head_dim = 0"),
        ("qwen3_5_text", {"ssm.state_size": None}, r"no metadata entry qwen35\.ssm\.state_size"),
        (
            "lfm2",
            {"attention.head_count_kv": [0, 0, 0]},
            r"head_count_kv = \[0, 0, 0\], not 0 or the same number",
        ),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, r"head_count_kv = \[0, 2\], not 0 or the same number"),
        ("lfm2", {"attention.head_count_kv": [1, 0, 2]}, "not 0 or the same number for each of 3 layers"),
        ("lfm2", {"attention.head_count_kv": [0, "x", 0]}, "head_count_kv"),
        ("lfm2", {"attention.head_count_kv": [0, [2], 0]}, "head_count_kv"),
        ("lfm2", {"attention.head_count_kv": [0, 0, -2]}, "head_count_kv"),
        ("lfm2", {"shortconv.l_cache": 2**30}, "conv_L_cache"),
        ("granitemoehybrid", {"ssm.group_count": 3}, "8 heads for 3 keys"),
        ("granitemoehybrid", {"ssm.inner_size": 7}, "mamba_expand = 0"),
        ("granitemoehybrid", {"ssm.inner_size": 72}, "8 heads of 9 in states of 64"),
        ("granitemoehybrid", {"ssm.state_size": 2**40}, "ssm.state_size"),
        ("granitemoehybrid", {"ssm.time_step_rank": None}, "no metadata entry granitehybrid.ssm.time_step_rank"),
        ("granitemoehybrid", {"attention.head_count_kv": [2, 2, 0, 0]}, "not 0 or the same number for each of 3"),
        ("granitemoehybrid", {"expert_count": 3, "expert_used_count": 4}, "use 4 experts, and the model has 3"),
        ("granitemoehybrid", {"expert_count": 3}, "num_experts_per_tok = 0"),
        ("granitemoehybrid", {"rope.scaling.finetuned": 1}, "finetuned = 1, not true or false"),
        ("lfm2_moe", {"expert_gating_func": 1}, "expert_gating_func = 1, which is not implemented"),
        ("lfm2_moe", {"leading_dense_block_count": -1}, "leading_dense_block_count = -1, not a whole number from 0"),
        ("lfm2_moe", {"leading_dense_block_count": "x"}, "leading_dense_block_count"),
        ("lfm2_moe", {"expert_used_count": 5}, "each token use 5 experts, and the model has 4"),
        ("lfm2_moe", {"expert_weights_scale": -1.0}, "expert_weights_scale"),
        ("qwen3_5_moe_text", {"expert_shared_feed_forward_length": None}, "no metadata entry qwen35moe.expert_shared"),
        ("qwen3_5_moe_text", {"expert_weights_norm": False}, "expert_weights_norm = False, which is not implemented"),
        ("qwen3_5_moe_text", {"expert_count": 2**20}, "num_experts"),
        ("qwen3_5_moe_text", {"expert_feed_forward_length": None}, "expert_feed_forward_length"),
        ("qwen3_next", {"ssm.group_count": 3}, "4 heads for 3 keys"),
    ],
    ids=str,
)
def test_sizes_of_states_are_checked(files: Files, family: str, entries: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        described(opened(files, family), entries)


@pytest.mark.parametrize(
    ("family", "entries", "words"),
    [
        ("qwen3_5_text", {"qwen35.ssm.conv_kernel": 3}, r"ssm_conv1d\.weight is \[80, 4\]"),
        ("qwen3_5_text", {f"qwen35.{RECURRENT}": None, "qwen35.full_attention_interval": 2}, "missing"),
        ("qwen3_5_text", {f"qwen35.{RECURRENT}": [True, False, False]}, "missing"),
        ("qwen3_5_text", {"qwen35.ssm.time_step_rank": 2}, "ssm_a is"),
        ("lfm2", {"lfm2.shortconv.l_cache": 4}, r"shortconv\.conv\.weight is \[32, 3\]"),
        ("lfm2", {"lfm2.attention.head_count_kv": 2}, "missing"),
        ("granitemoehybrid", {"granitehybrid.ssm.conv_kernel": 3}, r"ssm_conv1d\.weight is \[88, 4\]"),
        ("granitemoehybrid", {"granitehybrid.ssm.state_size": 8}, r"ssm_in\.weight is \[160, 32\]"),
        ("granitemoehybrid", {"granitehybrid.ssm.time_step_rank": 4}, r"ssm_in\.weight is \[160, 32\]"),
        ("granitemoehybrid", {"granitehybrid.attention.head_count_kv": 2}, "missing"),
        ("lfm2_moe", {"lfm2moe.leading_dense_block_count": 0}, "missing"),
        ("qwen3_5_moe_text", {"qwen35moe.expert_count": 5}, r"ffn_gate_exps\.weight|ffn_gate_inp"),
        (
            "qwen3_5_moe_text",
            {"qwen35moe.expert_shared_feed_forward_length": 99},
            r"ffn_down_shexp\.weight is \[32, 100\]",
        ),
        ("qwen3_next", {"qwen3next.ssm.time_step_rank": 2}, "is"),
    ],
    ids=str,
)
def test_states_of_other_sizes_are_refused(
    files: Files, tmp_path: Path, family: str, entries: dict[str, Any], words: str
) -> None:
    path = convert(files[family, "plain"][0].folder, tmp_path / "model.gguf", metadata=entries)
    with pytest.raises(ModelError, match=words):
        load_model(str(path), kernels="reference")


@pytest.mark.parametrize(("family", "layer"), [("qwen3_5_text", 1), ("granitemoehybrid", 2)])
def test_a_state_that_would_grow_is_refused(files: Files, tmp_path: Path, family: str, layer: int) -> None:
    path = convert(files[family, "plain"][0].folder, tmp_path / "model.gguf")
    place, content = GgufFile.open(path).tensors[f"blk.{layer}.ssm_a"], bytearray(path.read_bytes())
    content[place.offset : place.offset + 4] = np.float32(0.5).tobytes()
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"blk\.{layer}\.ssm_a has numbers above 0"):
        load_model(str(path), kernels="reference")


# --- metadata


def opened(files: Files, family: str) -> GgufFile:
    return GgufFile.open(files[family, next(iter(STORED[family]))][1])


def described(file: GgufFile, entries: Mapping[str, Any] = MappingProxyType({})) -> DecoderConfig:
    """Return the description of a file with other entries of its architecture."""
    changed = {f"{file.metadata['general.architecture']}.{key}": value for key, value in entries.items()}
    file = replace(file, metadata={**file.metadata, **changed})
    return read_gguf_decoder(file, read_gguf_config(file))


def windows(decoder: DecoderConfig) -> list[int | None]:
    return [layer.attention.window for layer in decoder.layers]


@pytest.mark.parametrize(
    ("family", "entries", "expected"),
    [
        ("gemma2", {}, [6, None, 6]),
        ("gemma2", {WINDOW: None}, [4096, None, 4096]),
        ("gemma2", {PATTERN: 3}, [6, 6, None]),
        ("gemma2", {PATTERN: 1}, [None, None, None]),
        ("gemma2", {PATTERN: 0}, [6, 6, 6]),
        ("gemma2", {PATTERN: [False, True, True]}, [None, 6, 6]),
        ("gemma3_text", {}, [6, 6, 6, 6, 6, None, 6]),
        ("gemma3_text", {WINDOW: None}, [None] * 7),
        ("gemma3_text", {WINDOW: 0}, [None] * 7),
        ("olmo3", {PATTERN: None}, [6, 6, 6, None, 6]),
        ("phi3", {WINDOW: 9}, [9, 9, 9]),
        ("qwen2", {WINDOW: 9}, [9, 9, 9]),
        (
            "qwen2",
            {WINDOW: 9, PATTERN: [True, False, True]},
            [9, None, 9],
        ),
    ],
    ids=str,
)
def test_windows_are_those_of_the_architecture_or_the_file(
    files: Files, family: str, entries: dict[str, Any], expected: list[int | None]
) -> None:
    assert windows(described(opened(files, family), entries)) == expected


@pytest.mark.parametrize(
    "pattern", [[True], [True] * 4, [1, 0, 1], ["x"] * 3, [], True, -1, 2**31, "x", 2.0, [[True] * 3]]
)
def test_patterns_of_windows_are_checked(files: Files, pattern: Any) -> None:
    with pytest.raises(ModelError, match=r"gemma2\.attention\.sliding_window_pattern"):
        described(opened(files, "gemma2"), {PATTERN: pattern})


@pytest.mark.parametrize("family", ["llama", "granite", "gpt2", "gpt_neox", "lfm2", "qwen3_5_text", "lfm2_moe"])
def test_windows_that_a_family_does_not_have_are_refused(files: Files, family: str) -> None:
    with pytest.raises(ModelError, match=f"a sliding window of 9 positions, which is not implemented for {family}"):
        described(opened(files, family), {WINDOW: 9})


def test_families_of_one_architecture_are_told_apart(files: Files) -> None:
    """A file of OLMo 3 has a window; one of Ministral 3 has a temperature."""
    file = opened(files, "olmo3")
    plain = {WINDOW: 0, PATTERN: None}
    assert windows(described(file, plain)) == [None] * 5
    architectures: dict[str, list[str | None]] = {}
    for family in gguf_families().values():
        architectures.setdefault(family.architecture, []).append(family.needs)
    for needs in architectures.values():
        assert len(needs) == len(set(needs)), "two families would read the same files"


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("gemma3_text", {"final_logit_softcapping": None, "rope.freq_base_swa": None}),
        ("gemma3_text", {"final_logit_softcapping": 0.0}),
        ("gpt_neox", {"use_parallel_residual": None}),
        ("olmo3", {"rope.freq_base": 5e5, "rope.freq_base_swa": None}),
    ],
    ids=str,
)
def test_what_files_lack_is_as_in_the_original(files: Files, family: str, entries: dict[str, Any]) -> None:
    file = opened(files, family)
    assert differences(described(file, entries), described(file)) == []


@pytest.mark.parametrize("value", [None, 0.0])
def test_multipliers_that_a_file_lacks_change_nothing(files: Files, value: float | None) -> None:
    own = described(opened(files, "granite"), {"embedding_scale": value, "residual_scale": value})
    assert (own.embedding.scale, own.layers[0].residual_scale) == (1.0, 1.0)


ENTRIES = [
    (family, entry)
    for family, data in gguf_families().items()
    for entry in (
        *(each for each in data.config.values() if isinstance(each, Number | Truth)),
        Number(data.stored_norm_eps),
    )
]


def entry_name(given: Any) -> str:
    """Return a test's name of an entry, without a function's address."""
    return given.key if isinstance(given, Number | Truth) else str(given)


@pytest.mark.parametrize(("family", "entry"), ENTRIES, ids=entry_name)
@pytest.mark.covering(1)
@pytest.mark.parametrize("value", ["x", [1.0, 2.0], [], -1.0, math.nan, math.inf, 1e-40, 1e39, None, 0], ids=str)
def test_own_entries_of_families_are_checked(files: Files, family: str, entry: Number | Truth, value: Any) -> None:
    """A value is used, or refused by its name."""
    file = opened(files, family)
    absent = isinstance(entry, Truth) or entry.default is not ... or entry.key == gguf_families()[family].needs
    zero = (isinstance(entry, Number) and entry.zero is not ...) or entry.key == gguf_families()[family].needs
    unchecked = value in UNCHECKED.get(entry.key, ())
    if (value is None and absent) or (value == 0 and zero) or unchecked:
        described(file, {entry.key: value})
        return
    with pytest.raises(ModelError) as caught:
        described(file, {entry.key: value})
    known = [key.rpartition(".")[2] for key, each in gguf_families()[family].config.items() if each == entry]
    assert any(name in str(caught.value) for name in (entry.key, *known, gguf_families()[family].norm_eps))


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family == "gemma2" else pytest.mark.slow) for family in gguf_families()]
)
def test_damaged_entries_are_errors_or_models(files: Files, family: str) -> None:
    file = opened(files, family)
    prefix = f"{file.metadata['general.architecture']}."
    values = ("x", "", -1, 0, 1, 3, 2**31, 2**64, -1.0, 1e-40, 1e39, math.nan, math.inf, True, [], [1, 2], ["x"], [[1]])
    for key in (each for each in file.metadata if each.startswith(prefix)):
        for value in values:
            with suppress(ModelError):
                described(file, {key.removeprefix(prefix): value})


# --- encoder-decoder models: their start token, their head, and files that can't be used

NATIVE = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
KERNELS = ["reference", pytest.param("native", marks=NATIVE)]
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pair_of(tmp_path_factory.mktemp("t5"), "t5", "flan").folder


@pytest.fixture
def write(folder: Path, tmp_path: Path) -> Write:
    """Return what writes the model as a file with other metadata."""
    return lambda **entries: convert(folder, tmp_path / "t5.gguf", metadata=entries)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("own_head", [False, True])
def test_a_head_of_its_own_is_not_scaled(folder: Path, tmp_path: Path, own_head: bool, kernels: str) -> None:
    """T5 1.1 has one. The logits of T5 1.0, whose head is the table, are scaled."""
    tensors = load_file(folder / "model.safetensors")
    if own_head:
        tensors["lm_head.weight"] = tensors["shared.weight"].flip(0) * 1.5
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = (folder / "config.json").read_text().replace('"scale_decoder_outputs": true', '"x": 0')
    (source / "config.json").write_text(
        config.replace('"tie_word_embeddings": true', f'"tie_word_embeddings": {str(not own_head).lower()}')
    )
    path = convert(source, tmp_path / "model.gguf")
    own, other = (load_model(str(place), kernels=kernels).model for place in (path, source))
    assert (own.config.head.scale == 1, own.config.head.tied) == (own_head, not own_head)  # type: ignore[attr-defined]
    torch.testing.assert_close(Session(own).extend(TOKENS), Session(other).extend(TOKENS), rtol=1e-5, atol=1e-5)


def test_the_start_token_is_that_of_the_metadata(write: Write) -> None:
    assert load_model(str(write(**{"t5.decoder_start_token_id": 7}))).start_tokens == (7,)
    absent = write(**{"t5.decoder_start_token_id": None, "tokenizer.ggml.bos_token_id": 5})
    assert load_model(str(absent)).start_tokens == (5,)


def test_a_decoder_has_the_encoder_s_layers_unless_stated(write: Write) -> None:
    assert load_model(str(write(**{"t5.decoder_block_count": None}))).model.num_layers == 3


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "t5encoder"}, "the architecture t5encoder, an encoder alone"),
    ({"t5.decoder_start_token_id": 61}, r"t5\.decoder_start_token_id = 61, not a token id from 0 to 60"),
    ({"t5.decoder_start_token_id": True}, r"t5\.decoder_start_token_id = True, not a token id"),
    ({"t5.decoder_block_count": 2}, r"2 layers and holds tensors of 3 layers dec\.blk\.\*"),
    ({"t5.block_count": 4}, r"4 layers and holds tensors of 3 layers enc\.blk\.\*"),
    ({"t5.attention.relative_buckets_count": None}, r"no metadata entry t5\.attention\.relative_buckets_count"),
    ({"t5.attention.relative_buckets_count": 16}, r"attn_rel_b\.weight"),
]


@pytest.mark.parametrize(("entries", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_file_that_cannot_be_used_is_refused(write: Write, entries: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        load_model(str(write(**entries)))
    assert caught.value.fix
