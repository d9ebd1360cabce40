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

from speculant.errors import ModelError
from speculant.kernels.native import usable_sets
from speculant.lab.quantize import gguf
from speculant.lab.quantize.check import check_model, differences
from speculant.lab.quantize.folder import write_folder
from speculant.lab.quantize.layouts import LAYOUTS
from speculant.models.backends.base import RoundsWeights, find_backends
from speculant.models.description import DecoderConfig
from speculant.models.rope_config import _KNOWN as ROPE_KEYS
from speculant.models.weights.load import CheckpointFiles, read_description
from speculant.models.weights.source import read_plain
from tests.unit.models.families import SMALL, VARIANTS, write_own
from tests.unit.models.test_gguf_families import STORED

pytestmark = [
    pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built"),
    pytest.mark.usefixtures("families_are_looked_up_once"),
]
FULL, SLIDES = "full_attention", "sliding_attention"
SHARED = [f"speculant.models.{name}" for name in ("config", "rope_config", "entries")]
NAME = re.compile(r"[a-z][a-z_0-9]+")
WRONG = "?"  # no entry may have this value, so a family that reads the entry says so
ABSENT = object()
Settings = dict[str, Any]
FLAG = [False, True, None]
ACTS = ["silu", "gelu", "gelu_pytorch_tanh", "relu"]


def layers_of(*kinds: str) -> Callable[[Settings], list[str]]:
    return lambda config: [kinds[index % len(kinds)] for index in range(config["num_hidden_layers"])]


# Legal values of each entry, beside an absent one. A value may be a function of the other entries.
VALUES: Mapping[str, list[Any]] = {
    "vocab_size": [64],
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), [64]),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "moe_intermediate_size"), [64]),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), [1, 2]),
    "num_decoder_layers": [1, 4],
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), [2, 8]),
    "num_key_value_heads": [1, 4, None],
    **dict.fromkeys(("max_position_embeddings", "n_positions"), [64]),
    **dict.fromkeys(("head_dim", "d_kv"), [12, 32]),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), [1e-3]),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "scale_decoder_outputs"), FLAG),
    **dict.fromkeys(("norm_topk_prob", "use_parallel_residual", "scale_attn_weights", "is_gated_act"), FLAG),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "dense_act_fn"), ACTS),
    "feed_forward_proj": ["relu", "gelu", "gated-gelu", "gated-silu"],
    "use_sliding_window": FLAG,
    "sliding_window": [None, 5],
    "max_window_layers": [0, 1, 2, 28],
    "sliding_window_pattern": [1, 2, 9],
    "layer_types": [layers_of(SLIDES), layers_of(FULL), layers_of(FULL, SLIDES), layers_of(SLIDES, FULL, SLIDES), None],
    "no_rope_layer_interval": [1, 2, 3],
    "no_rope_layers": [None, lambda config: [index % 2 for index in range(config["num_hidden_layers"])]],
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), [300.0, 10000.0]),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), [0.5, 0.75, 1.0]),
    "original_max_position_embeddings": [16, 64],
    "pard_token": [5],
    "query_pre_attn_scalar": [3, 8],
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), [None, 7.0]),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier"), [1.0, 0.7]),
    **dict.fromkeys(("logits_scaling", "logit_scale"), [1.0, 0.3]),
    **dict.fromkeys(("num_experts", "num_local_experts"), [6]),
    "num_experts_per_tok": [1, 3],
    "mlp_only_layers": [[], [1]],
    "decoder_sparse_step": [1, 2],
    "relative_attention_num_buckets": [8, 32],
    "relative_attention_max_distance": [64, 128],
    **dict.fromkeys(("clip_qkv", "use_qk_norm", "use_bidirectional_attention"), [None]),  # not implemented
    "scale_attn_by_inverse_layer_idx": [None],
    **dict.fromkeys(("rope_scaling", "rope_parameters"), [None]),  # see KINDS
}
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
    "long_factor": [lambda rope: rope["short_factor"]],
}
BETA = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def kinds(pairs: int) -> dict[str, Settings]:
    """Return the settings of each kind of rotary positions, for as many rotated pairs."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    long = [1.0 + index for index in range(pairs)]
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * pairs, "long_factor": long}
    return {
        "default": BETA,
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
    found = [{**SMALL, **own} for named in (STORED[family], VARIANTS.get(family, {})) for own in named.values()]
    return [{**each, "model_type": family} for each in found]


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


def changes(family: str) -> Iterator[tuple[str, Settings]]:
    """Yield a name and the settings of each variant of a family: one entry is another, or absent."""
    for name, base in keys_of(family):
        for value in [ABSENT, *VALUES[name]]:
            made = {**base, name: value(base) if callable(value) else value}
            if value is ABSENT:
                del made[name]
            yield name, made
    if "rope_scaling" not in dict(keys_of(family)):
        return
    base = bases(family)[0]
    pairs = (described(base) or _no()).attention.rotated // 2
    for kind, rope in kinds(pairs).items():
        yield f"rope.{kind}", nested(family, base, rope)
        for name, values in ROPE_VALUES.items():
            for value in values:
                made = {**rope, name: value(rope) if callable(value) and name in rope else value}
                yield f"rope.{kind}.{name}", nested(family, base, made)


def _no() -> DecoderConfig:
    raise AssertionError("the first variant is not legal")


def nested(family: str, base: Settings, rope: Settings) -> Settings:
    """Return settings with these rotary positions, in the form that the family reads."""
    clean = {name: value for name, value in base.items() if name not in ("rope_scaling", "rope_parameters")}
    if family not in ("gemma3_text", "olmo3"):
        return {**clean, "rope_parameters": {"rope_theta": 1e4, **rope}}
    return {**clean, "rope_parameters": {FULL: {"rope_theta": 1e4, **rope}, SLIDES: {"rope_theta": 1e3}}}


@pytest.fixture(scope="module", autouse=True)
def _no_tokenizers() -> Iterator[None]:
    """These checkpoints have no tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "text_entries", lambda *_: {})
        yield


def outcome(root: Path, family: str, settings: Settings) -> str:
    """Write a random model as a file; return "equal", or the names that its refusal has."""
    backend = next(each for each in find_backends("native") if isinstance(each, RoundsWeights))
    root.mkdir()
    write_own(root, family, settings)
    file = root / "model.gguf"
    try:
        model = gguf.read_folder(root)
        gguf.write_gguf(model, "int8", backend, file, lambda _: None, partial(check_model, root))
    except ModelError as error:
        assert (words := re.search(r"the model has (.*), and a GGUF file of its family has no key", error.problem)), error
        return " ".join(re.findall(r"(?:^|, )([a-z_0-9.]+) = ", words[1]))
    same_model(root, file)
    return "equal"


def same_model(source: Path, made: Path) -> None:
    """Compare two models: all that a pass reads of a description, and the weights as far as they are rounded."""
    one, other = (CheckpointFiles.open(place) for place in (source, made))
    read = replace(other.decoder, tensors=one.decoder.tensors, head=replace(other.decoder.head, tied=one.decoder.head.tied))
    assert list(differences(one.decoder, read)) == []
    for name in one.weights.names():
        old, new = (read_plain(each.weights, name).float() for each in (one, other))
        assert float((new - old).norm() / old.norm()) < 0.01, name


def test_every_entry_has_values() -> None:
    """An entry that a family begins to read needs values here."""
    read = {name for family in LAYOUTS for name, _ in keys_of(family)}
    assert read == VALUES.keys()
    assert ROPE_VALUES.keys() >= ROPE_KEYS - {"factors", "long_factors", "dims", "finetuned", "max_position_embeddings", "mrope_section", "mrope_interleaved"}


REFUSED: dict[str, set[str]] = {}


@pytest.mark.parametrize("family", LAYOUTS)
def test_settings_are_equal_in_a_file_or_refused_by_name(tmp_path: Path, family: str) -> None:
    found: dict[str, set[str]] = {}
    count = 0
    for number, (name, settings) in enumerate(changes(family)):
        if described(settings) is not None:
            count += 1
            try:
                found.setdefault(outcome(tmp_path / str(number), family, settings), set()).add(name)
            except Exception as e:
                print("FAIL", family, name, settings.get(name), repr(e)[:300])
    print(family, count, {k: len(v) for k, v in found.items()}, {k: v for k, v in found.items() if k != "equal"})
