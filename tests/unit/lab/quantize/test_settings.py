"""Every entry that a family reads from config.json is in a quantised model as it was, or is refused by its name."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculant.errors import ModelError
from speculant.kernels import usable_sets
from speculant.lab.quantize import check_model, differences, gguf, quantize, write_folder
from speculant.models import CheckpointFiles, DecoderConfig, RoundsWeights, find_backends, read_description, read_plain
from speculant.models.config import _KNOWN as ROPE_KEYS
from tests.gguf_models import converted
from tests.unit.models.families import SMALL, VARIANTS, write_own
from tests.unit.models.test_gguf_families import CASES, STORED

pytestmark = [
    pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built"),
    pytest.mark.usefixtures("families_are_looked_up_once"),
]
FULL, SLIDES = "full_attention", "sliding_attention"
SHARED = ["speculant.models.config"]
NAME = re.compile(r"[a-z][A-Za-z_0-9]+")
WRONG = "?"  # no entry may have this value, so a family that reads the entry says so
ABSENT = object()
Settings = dict[str, Any]
FLAG = [False, True, None]


def layers_of(*kinds: str) -> Callable[[Settings], list[str]]:
    return lambda config: [kinds[index % len(kinds)] for index in range(config["num_hidden_layers"])]


ALTERNATING = layers_of(SLIDES, FULL, SLIDES)
HYBRID = [layers_of(*kinds) for other in ("conv", "linear_attention") for kinds in ((other, FULL), (FULL, other))]
# Legal values of entries, beside an absent one. A value may be a function of the other entries.
GROUPS: list[tuple[str, list[Any]]] = [
    ("vocab_size hidden_size n_embd d_model intermediate_size n_inner d_ff", [64]),
    ("moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size", [64]),
    ("num_hidden_layers n_layer num_layers num_decoder_layers", [1, 2, 4]),
    ("num_attention_heads n_head num_heads", [2, 8]),
    ("num_key_value_heads", [1, 4, None]),
    ("max_position_embeddings n_positions", [64]),
    ("head_dim d_kv", [12, 32]),
    ("rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps", [1e-3]),
    ("tie_word_embeddings attention_bias mlp_bias use_bias scale_decoder_outputs norm_topk_prob", FLAG),
    ("use_parallel_residual scale_attn_weights is_gated_act use_sliding_window", FLAG),
    ("tie_embedding conv_bias block_auto_adjust_ff_dim mamba_conv_bias mamba_proj_bias", FLAG),
    ("block_ff_dim block_multiple_of", [96]),
    ("block_ffn_dim_multiplier", [1.5]),
    ("full_attention_interval", [1, 2, 3]),
    ("full_attn_idxs", [[0], [1, 2]]),
    ("linear_num_key_heads linear_num_value_heads", [1, 4, 6]),
    ("linear_key_head_dim linear_value_head_dim", [4, 16]),
    ("linear_conv_kernel_dim conv_L_cache mamba_d_conv", [2, 5]),
    ("mamba_n_heads mamba_n_groups", [1, 2, 4]),
    ("mamba_d_state", [4, 16]),
    ("mamba_d_head", ["auto", 4, 8]),
    ("mamba_expand", [1, 2, 3]),
    ("time_step_limit", [None, [0.1, 1.0]]),
    ("position_embedding_type", ["rope", "nope"]),
    ("hidden_act hidden_activation activation_function dense_act_fn", ["silu", "gelu", "gelu_pytorch_tanh", "relu"]),
    ("feed_forward_proj", ["relu", "gelu", "gated-gelu", "gated-silu"]),
    ("sliding_window", [None, 5]),
    ("max_window_layers", [0, 1, 2, 28]),
    ("sliding_window_pattern", [1, 2, 9]),
    ("layer_types", [layers_of(SLIDES), layers_of(FULL), layers_of(FULL, SLIDES), ALTERNATING, *HYBRID, None]),
    ("no_rope_layer_interval", [1, 2, 3]),
    ("no_rope_layers", [None, lambda config: [index % 2 for index in range(config["num_hidden_layers"])]]),
    ("rope_theta rotary_emb_base rope_local_base_freq", [300.0, 10000.0]),
    ("partial_rotary_factor rotary_pct", [0.5, 0.75, 1.0]),
    ("original_max_position_embeddings", [16, 64]),
    ("pard_token", [5]),
    ("query_pre_attn_scalar", [3, 8, None]),
    ("attn_logit_softcapping final_logit_softcapping", [None, 7.0]),
    ("embedding_multiplier attention_multiplier residual_multiplier logits_scaling logit_scale", [1.0, 0.3]),
    ("num_experts num_local_experts", [6]),
    ("num_experts_per_tok", [1, 3]),
    ("mlp_only_layers", [[], [1]]),
    ("num_dense_layers", [0, 1, 2]),
    ("use_expert_bias", FLAG),
    ("routed_scaling_factor", [1.0, 1.7]),
    ("decoder_sparse_step", [1, 2]),
    ("relative_attention_num_buckets", [8, 32]),
    ("relative_attention_max_distance", [64, 128]),
    ("clip_qkv use_qk_norm use_bidirectional_attention scale_attn_by_inverse_layer_idx", [None]),  # not implemented
    ("rope_scaling rope_parameters", [None]),  # see `kinds`
]
VALUES = {name: values for names, values in GROUPS for name in names.split()}
ROPE_VALUES: Mapping[str, list[Any]] = {
    "rope_type": [],
    "type": [],
    "rope_theta": [300.0],
    "partial_rotary_factor": [0.5, 1.0],
    "factor": [1.0, 4.0],
    "original_max_position_embeddings": [16, 64],
    "low_freq_factor": [2.0],
    "high_freq_factor": [8.0],
    "attention_factor": [1.0, 1.3, 0.8],
    "beta_fast": [0, 8.0],
    "beta_slow": [0, 2.0],
    "mscale": [1.0, 0.7],
    "mscale_all_dim": [0, 1.0, 0.5],
    "truncate": FLAG,
    "llama_4_scaling_beta": [0, 0.2],
    "short_factor": [lambda rope: [1.5 for _ in rope["short_factor"]]],
    "long_factor": [lambda rope: rope["short_factor"]],  # the same for all texts
}
NOT_SETTINGS = {  # of heads that are trained here, for images, or without an effect
    *("factors", "long_factors", "dims", "mrope_section", "mrope_interleaved"),
    *("finetuned", "max_position_embeddings"),
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def kinds(base: Settings) -> dict[str, Settings]:
    """Return the settings of each kind of rotary positions."""
    made = described(base)
    assert made is not None
    pairs = made.attention.rotated // 2
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    long = [1.0 + index for index in range(pairs)]
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * pairs, "long_factor": long}
    return {
        "default": {"rope_type": "default"},
        "beta": {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32},
        "linear": {"rope_type": "linear", "factor": 4.0},
        "dynamic": {"rope_type": "dynamic", "factor": 2.0},
        "llama3": {"rope_type": "llama3", **LLAMA3},
        "yarn": yarn,
        "mscales": {**yarn, "mscale": 1.0, "mscale_all_dim": 0.5},
        "longrope": {**longrope, "original_max_position_embeddings": 32},
        "su": {**longrope, "rope_type": "su", "original_max_position_embeddings": 64},
        "proportional": {"rope_type": "proportional", "factor": 3.0},
    }


@cache
def bases(family: str) -> list[Settings]:
    """Return the settings of a family's variants, those that files can hold first."""
    named = [*STORED[family].values(), *VARIANTS.get(family, {}).values()]
    found = [{**SMALL, **own, "model_type": family} for own in named]
    found.insert(1, {**found[0], "use_sliding_window": True, "sliding_window": 6})
    return [each for each in found if described(each)]


@cache
def keys_of(family: str) -> list[tuple[str, Settings]]:
    """Return the entries that a family reads, each with the first variant in which it reads them."""
    module = f"speculant.models.families.{family}"
    names = dict.fromkeys(name for each in [*SHARED, *_families(module)] for name in _words(each))
    found = {}
    for base in bases(family):
        plain = described(base)
        for name in names.keys() - found.keys() - {"model_type", "quantization_config"}:
            if described({**base, name: WRONG}) != plain:
                found[name] = base
    return list(found.items())


def _families(module: str) -> set[str]:
    """Return a family's module, and those of the families that it imports."""
    of = {getattr(each, "__module__", "") or "" for each in vars(import_module(module)).values()}
    return {module, *(name for name in of if name.startswith("speculant.models.families."))}


@cache
def _words(module: str) -> list[str]:
    """Return the texts in a module's source that can be names of entries."""
    tree = ast.parse(inspect.getsource(import_module(module)))
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text for text in texts if NAME.fullmatch(text)]


def described(settings: Settings) -> DecoderConfig | None:
    """Return the description; None if the settings are not legal."""
    with suppress(ModelError):
        return read_description(settings)
    return None


def changes(family: str, *, every: bool) -> Iterator[tuple[str, Settings]]:
    """Yield a name and the settings of each variant of a family: one entry is another, or absent.

    every: the settings of each kind of rotary positions, too.
    """
    for name, base in keys_of(family):
        for value in [ABSENT, *VALUES[name]]:
            made = {**base, name: value(base) if callable(value) else value}
            if value is ABSENT:
                del made[name]
            yield name, made
    if "rope_scaling" not in dict(keys_of(family)):
        return
    base = bases(family)[0]
    for kind, rope in kinds(base).items():
        yield f"rope.{kind}", nested(base, rope)
        for name, values in ROPE_VALUES.items() if every else ():
            if described(nested(base, {**rope, name: WRONG})) != described(nested(base, rope)):
                for value in values:
                    yield f"rope.{kind}.{name}", nested(base, {**rope, name: value(rope) if callable(value) else value})


def nested(base: Settings, rope: Settings) -> Settings:
    """Return settings with these rotary positions, in the form that the family reads."""
    clean = {name: value for name, value in base.items() if name not in ("rope_scaling", "rope_parameters")}
    if base["model_type"] not in ("gemma3_text", "olmo3"):
        return {**clean, "rope_parameters": {"rope_theta": 1e4, **rope}}
    return {**clean, "rope_parameters": {FULL: {"rope_theta": 1e4, **rope}, SLIDES: {"rope_theta": 1e3}}}


@pytest.fixture(scope="module", autouse=True)
def _no_tokenizers() -> Iterator[None]:
    """These checkpoints have no tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "text_entries", lambda *_: {})
        yield


def refusal(source: Path, file: Path) -> ModelError | None:
    """Write a model as a file; return the error that refuses it, if one does."""
    try:
        gguf.write_gguf(gguf.read_folder(source), "int8", native(), file, lambda _: None, partial(check_model, source))
    except ModelError as error:
        return error
    return None


def native() -> RoundsWeights:
    return next(each for each in find_backends("native") if isinstance(each, RoundsWeights))


def outcome(root: Path, settings: Settings) -> str:
    """Write a random model as a file; return "equal", or the names that its refusal has."""
    root.mkdir()
    write_own(root, settings["model_type"], settings)
    error = refusal(root, root / "model.gguf")
    if error is None:
        same_model(root, root / "model.gguf")
        return "equal"
    assert "and a GGUF file of its family has no key for it" in error.problem, error
    return " ".join(re.findall(r"(?:the model has |, )(?:[a-z_]+\.)*([a-z_0-9]+) = ", error.problem))


def same_model(source: Path, made: Path) -> None:
    """Compare two models: all that a pass reads of a description, and the weights as far as they are rounded."""
    one, other = (CheckpointFiles.open(place) for place in (source, made))
    read = replace(
        other.decoder, tensors=one.decoder.tensors, head=replace(other.decoder.head, tied=one.decoder.head.tied)
    )
    assert list(differences(one.decoder, read)) == []
    for name in one.weights.names():
        old, new = (read_plain(each.weights, name).float() for each in (one, other))
        assert float((new - old).norm() / old.norm()) < 0.01, name


def test_every_entry_has_values() -> None:
    """An entry that a family begins to read needs values here."""
    read = {name for family in STORED for name, _ in keys_of(family)}
    assert read == VALUES.keys()
    assert ROPE_VALUES.keys() | NOT_SETTINGS == ROPE_KEYS


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_tensors_are_those_of_llama_cpp(tmp_path: Path, family: str, variant: str) -> None:
    write_own(tmp_path, family, {**SMALL, "num_experts_per_tok": 2, **STORED[family][variant]})
    files, tensors = CheckpointFiles.open(tmp_path), load_file(tmp_path / "model.safetensors")
    used = {files.decoder.tensors.stored(name): name for name in files.weights.names()}
    expected = converted({name: tensors[name] for name in used}, family, files.decoder)
    written = {name: each for name, each in gguf.read_folder(tmp_path).tensors.items() if not name.startswith("rope_")}
    if "t5" in family and files.decoder.head.tied and files.decoder.head.scale == 1:
        expected["output.weight"] = expected["token_embd.weight"]
    assert written.keys() == expected.keys()
    for name, tensor in written.items():
        assert tensor.shape == expected[name].shape
        assert torch.equal(tensor.read(), expected[name]), name


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "lfm2"])
def test_kinds_in_a_file_are_those_of_rounding_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr("speculant.lab.quantize.gguf.text_entries", lambda *_: {})
    monkeypatch.setattr("speculant.lab.quantize.folder.check_tokenizer", lambda *_: None)
    wide = {"hidden_size": 256, "intermediate_size": 256, "linear_value_head_dim": 64, "head_dim": 64}
    write_own(tmp_path, family, {**SMALL, **next(iter(STORED[family].values())), **wide})
    quantize(tmp_path, tmp_path / "model.gguf", "int4", lambda name: None)
    weights, exact = CheckpointFiles.open(tmp_path / "model.gguf").weights, ("conv1d", "in_proj_a", "in_proj_b")
    backend = next(each for each in find_backends("native") if isinstance(each, RoundsWeights))
    for name in weights.names():
        plain = len(weights.shape(name)) != 2 or name.split(".")[-2] in exact
        kind = "F32" if plain else backend.rounded_kind("int4", name, weights.shape(name)[1])
        assert weights.kind(name) == kind, name


@pytest.mark.parametrize("family", ["gemma2", "qwen3_5_text"])
def test_vectors_of_bfloat16_change_in_float32(tmp_path: Path, family: str) -> None:
    """Such as norms, to which 1 is added."""
    write_own(tmp_path, family, {**SMALL, **next(iter(STORED[family].values()))})
    tensors = {name: each.bfloat16() for name, each in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    written, decoder = gguf.read_folder(tmp_path).tensors, CheckpointFiles.open(tmp_path).decoder
    for name, expected in converted({own: each.float() for own, each in tensors.items()}, family, decoder).items():
        assert expected.ndim > 1 or torch.equal(written[name].read(), expected), name


ROPE = {"rope_type", "llama_4_scaling_beta"}  # dynamic scaling, proportional with a share; of no other architecture
GEMMA = {"query_pre_attn_scalar", "attn_logit_softcapping", "hidden_activation"}
SIZES = "linear_key_head_dim linear_value_head_dim linear_num_value_heads"  # of layer_types that no interval gives
T5 = {"relative_attention_max_distance", "feed_forward_proj", "dense_act_fn"}
REFUSED: dict[str, set[str]] = {  # what GGUF has no key for
    **{family: {"hidden_act", *ROPE} for family in STORED},
    "mistral": {"hidden_act", "rope_type"},
    "ministral3": {"hidden_act", "rope_type"},
    "qwen3_moe": {"hidden_act", "mlp_only_layers", "decoder_sparse_step", *ROPE},
    "smollm3": {"hidden_act", "no_rope_layers", "no_rope_layer_interval", *ROPE},
    "gemma2": {*GEMMA, "final_logit_softcapping", *ROPE},
    "gemma3_text": {*(GEMMA - {"attn_logit_softcapping"}), "rope_theta", *ROPE},
    "gpt2": {"activation_function", "scale_attn_weights"},
    "qwen3_5_text": ROPE,
    "qwen3_5_moe_text": ROPE,
    "qwen3_next": {"mlp_only_layers", "decoder_sparse_step", *ROPE},
    "lfm2_moe": {"conv_bias", "use_expert_bias", *ROPE},
    "lfm2": {"conv_bias", *ROPE},
    "granitemoehybrid": {
        "mamba_proj_bias",
        "time_step_limit",
        "model_type",
    },  # Granite's files have no unrotated layers
    "t5": T5,
    "umt5": {*T5, "model_type"},  # with one layer in the decoder, a file is one of T5
}
WITHOUT_LINEAR = ("gpt2", "gpt_neox")  # modules that compressed-tensors knows
QUICK = ("llama", "gemma2", "smollm3", "gpt2", "t5")


def value_of(change: tuple[str, Settings]) -> tuple[str, str]:
    name, settings = change
    return name, str(settings.get(name, ABSENT))


@pytest.mark.parametrize(
    ("family", "every"),
    [*((family, False) for family in QUICK), *(pytest.param(each, True, marks=pytest.mark.slow) for each in STORED)],
)
def test_settings_are_equal_in_a_file_or_refused_by_name(tmp_path: Path, family: str, every: bool) -> None:
    found: dict[str, list[str]] = {}
    legal = [each for each in changes(family, every=every) if described(each[1])]
    if not every:  # what other families read, too, is tried with the first of them
        own = REFUSED[family] | {"pard_token"}
        before = {value_of(each) for other in QUICK[: QUICK.index(family)] for each in changes(other, every=False)}
        legal = [each for each in legal if "." in each[0] or each[0] in own or value_of(each) not in before]
    for number, (name, settings) in enumerate(legal):
        found.setdefault(outcome(tmp_path / str(number), settings), []).append(name)
    equal = found.pop("equal")
    share = {"factor partial_rotary_factor"} if every else set()  # of proportional positions
    assert found.keys() - share == REFUSED[family] | {"pard_token"}, found
    assert len(equal) > (3 if every else 1) * len(REFUSED[family])


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("llama", {"rope_parameters": {**YARN, "rope_type": "linear"}}),
        ("gemma3_text", {"rope_scaling": {**YARN, "rope_type": "linear"}}),
        ("phi3", {"rope_parameters": {**YARN, "truncate": False}}),
        ("olmo3", {"rope_scaling": YARN, "original_max_position_embeddings": 64}),
        ("ministral3", {"rope_scaling": None}),
    ],
)
def test_a_file_has_the_extended_context(tmp_path: Path, family: str, own: Settings) -> None:
    settings = {**SMALL, "model_type": family, **next(iter(STORED[family].values())), **own}
    assert outcome(tmp_path / "model", settings) == "equal"


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each == "llama" else pytest.mark.slow) for each in STORED]
)
def test_settings_are_equal_in_a_folder(tmp_path: Path, family: str) -> None:
    legal = [settings for _, settings in changes(family, every=False) if described(settings)]
    for number, settings in enumerate(legal):
        (source := tmp_path / str(number)).mkdir()
        write_own(source, family, settings)
        (out := tmp_path / f"{number} out").mkdir()
        try:
            write_folder(source, "int8", native(), out, lambda _: None)
        except ModelError:
            assert family in WITHOUT_LINEAR or settings["hidden_size"] % 32, settings
        else:
            same_model(source, out)
