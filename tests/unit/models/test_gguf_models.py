"""Models in GGUF files compute the same as in safetensors; files that are no model are refused."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speculant.errors import ConfigError, ModelError
from speculant.gguf_file import GgufFile
from speculant.kernels import BLOCK_TYPES
from speculant.models import (
    HEAD,
    NEUTRAL,
    TABLE,
    Checkpoint,
    Mapped,
    QuantizedBlocks,
    Rope,
    TensorMap,
    Unpaired,
    decode,
    gguf_weights,
    load_model,
    read_gguf_config,
    read_gguf_decoder,
    read_plain,
)
from speculant.params import SamplingParams
from speculant.text import read_gguf_tokenizer
from tests.gguf_models import DECODED, FLOATS, LARGE_BLOCKS, SMALL_BLOCKS, convert, decoded
from tests.models import ALPHABET, END, HIDDEN_SIZE, VOCAB_SIZE, Shape, write_checkpoint
from tests.unit.models.families import Session, make_pair
from tests.unit.models.loaded import refused

pytestmark = pytest.mark.usefixtures("families_are_looked_up_once")
FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {}}
KERNELS = ["reference", "native"]
TOKENS = list(range(40, 72))
WIDE = 256  # K-quants have blocks of 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_checkpoint(tmp_path_factory.mktemp("llama") / "model"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_checkpoint(tmp_path_factory.mktemp("wide") / "model", Shape(layers=1, hidden_size=WIDE)))


@pytest.fixture(scope="module")
def file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return GgufFile.open(convert(folder, tmp_path_factory.mktemp("file") / "model.gguf"))


def with_entries(file: GgufFile, entries: dict[str, Any]) -> GgufFile:
    return replace(file, metadata={**file.metadata, **entries})


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    return Session(checkpoint.model).extend(TOKENS)


def same_as_decoded(path: Path, folder: Path, out: Path, kernels: str) -> Checkpoint:
    """Compare a file's logits with those of the weights that the gguf package decodes.

    Native kernels round activations to 8 bits where weights are blocks; logits then differ by a few hundredths of their
    spread.
    """
    has_blocks = bool(gguf_weights(GgufFile.open(path)).quantised_kinds())
    own = load_model(str(path), dtype="float32" if has_blocks else "auto", kernels=kernels)
    dtype = str(own.dtype).removeprefix("torch.")
    expected = load_model(str(decoded(path, folder, out)), dtype=dtype, kernels=kernels)
    found, wanted = logits(own), logits(expected)
    if kernels == "native" and has_blocks:
        assert 0 < (found - wanted).square().mean().sqrt() < 0.1 * wanted.std()
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    return own


# --- logits


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_safetensors(tmp_path: Path, family: str, tied: bool, kernels: str) -> None:
    source = Path(write_checkpoint(tmp_path / "source", Shape(family=family, tied=tied)))
    path = convert(source, tmp_path / "model.gguf")
    own, expected = (load_model(str(each), kernels=kernels) for each in (path, source))
    assert own.dtype == expected.dtype == torch.float32
    assert torch.equal(logits(own), logits(expected))
    assert own.eos_token_ids == {END}
    assert own.folder == path


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", [*FLOATS, *SMALL_BLOCKS])
def test_each_kind_of_weights_is_decoded_as_by_the_gguf_package(
    folder: Path, tmp_path: Path, kind: str, kernels: str
) -> None:
    path = convert(folder, tmp_path / "model.gguf", kind)
    own = same_as_decoded(path, folder, tmp_path / "decoded", kernels)
    assert own.dtype == (torch.bfloat16 if kind == "BF16" else torch.float32)
    assert bool(own.quantizations) == (kernels == "native" and kind in FLOATS)


def test_the_cache_of_a_model_in_blocks_is_bfloat16(folder: Path, tmp_path: Path) -> None:
    path = convert(folder, tmp_path / "model.gguf", "Q8_0")
    assert load_model(str(path)).dtype == torch.bfloat16
    assert load_model(str(path), dtype="float32").dtype == torch.float32


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", [*LARGE_BLOCKS, *DECODED])
def test_large_blocks_and_blocks_without_kernels_are_decoded(
    wide: Path, tmp_path: Path, kind: str, kernels: str
) -> None:
    path = convert(wide, tmp_path / "model.gguf", kind)
    same_as_decoded(path, wide, tmp_path / "decoded", kernels)


@pytest.mark.parametrize("kernels", KERNELS)
def test_kinds_may_differ_between_matrices(wide: Path, tmp_path: Path, kernels: str) -> None:
    kinds = {"attn_q": "Q4_K", "attn_k": "Q6_K", "attn_v": "Q8_0", "ffn_down": "Q5_K", "token_embd": "F16"}
    path = convert(wide, tmp_path / "model.gguf", lambda name: kinds.get(name.split(".")[-2], "Q4_0"))
    same_as_decoded(path, wide, tmp_path / "decoded", kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("linear", [1.0, 2.0])
def test_factors_of_rotary_positions_divide_frequencies(tmp_path: Path, kernels: str, linear: float) -> None:
    """The scaling of Llama 3.1 is stored as a factor for each pair; here it is compared with transformers' formula."""
    pair = make_pair(tmp_path / "source", "llama", "llama3.2")
    theirs = pair.theirs.model.rotary_emb.inv_freq.numpy()
    plain = 1 / 500000.0 ** (np.arange(0, 16, 2) / 16)
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": linear} if linear != 1 else {}
    factors = (plain / theirs / linear).astype(np.float32)
    path = convert(pair.folder, tmp_path / "m.gguf", metadata=metadata, extra={"rope_freqs.weight": factors})
    own = load_model(str(path), kernels=kernels)
    tokens = [token % 61 for token in TOKENS]
    torch.testing.assert_close(Session(own.model).extend(tokens), pair.reference(tokens), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("scaling", "factor", "original", "expected"),
    [("yarn", 4.0, 128, 512), ("yarn", 4.0, 64, 256), ("yarn", 4.0, None, 1024), ("linear", 2.0, None, 512)],
)
def test_a_scaling_extends_the_context_of_a_file(
    folder: Path, tmp_path: Path, scaling: str, factor: float, original: int | None, expected: int
) -> None:
    """Converters copy max_position_embeddings (here 256), which may be the extended context already."""
    metadata = {"llama.rope.scaling.type": scaling, "llama.rope.scaling.factor": factor}
    if original is not None:
        metadata["llama.rope.scaling.original_context_length"] = original
    assert load_model(str(convert(folder, tmp_path / "m.gguf", metadata=metadata))).model.max_positions == expected


@pytest.mark.parametrize("part", [1, 2])
def test_any_part_of_a_split_file_is_the_model(folder: Path, tmp_path: Path, part: int) -> None:
    first = convert(folder, tmp_path / "model.gguf", parts=3)
    own = load_model(str(first).replace("-00001-", f"-0000{part}-"))
    assert own.folder == first
    assert torch.equal(logits(own), logits(load_model(str(folder))))


def test_native_kernels_keep_packed_weights_of_a_file(folder: Path, tmp_path: Path) -> None:
    path = convert(folder, tmp_path / "model.gguf", "Q8_0")
    found = [load_model(str(path), kernels="native", weight_cache=tmp_path / "cache") for _ in range(2)]
    assert torch.equal(*map(logits, found))


# --- sources of weights


@pytest.mark.parametrize("kind", ["Q4_0", "F16"])
def test_rows_are_selected_without_decoding(folder: Path, tmp_path: Path, kind: str) -> None:
    file = GgufFile.open(convert(folder, tmp_path / "model.gguf", kind))
    names = TensorMap(
        ((TABLE, "token_embd.weight"), (HEAD, "output.weight"), ("q", Unpaired("blk.0.attn_q.weight", 4)))
    )
    table = gguf_weights(file).shape("token_embd.weight")
    weights = Mapped(gguf_weights(file), {TABLE: table, HEAD: table, "q": (HIDDEN_SIZE, HIDDEN_SIZE)}, names)
    rows = [9 if row in (5, *range(VOCAB_SIZE, VOCAB_SIZE + 3)) else row for row in range(VOCAB_SIZE + 3)]
    short, fitted = weights.with_rows({HEAD: (HEAD, (3, 7, 200))}), weights.with_rows({TABLE: (TABLE, rows)})
    for source, name in ((short, HEAD), (fitted, TABLE), (weights, "q")):
        found = source.read(name)
        assert isinstance(found, QuantizedBlocks) == (kind == "Q4_0")
        assert tuple(found.shape) == source.shape(name)
    assert torch.equal(read_plain(short, HEAD), read_plain(weights, HEAD)[[3, 7, 200]])
    assert torch.equal(read_plain(fitted, TABLE)[5], read_plain(weights, TABLE)[9])


def test_a_large_matrix_is_decoded_in_parts(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    weights = gguf_weights(GgufFile.open(convert(folder, tmp_path / "model.gguf", "Q4_0")))
    blocks = weights.read("token_embd.weight")
    assert isinstance(blocks, QuantizedBlocks)
    whole = decode(blocks, torch.float32)
    monkeypatch.setattr("speculant.models.weights.source.DECODED_AT_ONCE", 7 * 32)
    assert torch.equal(decode(blocks, torch.float32), whole)


def test_a_tensor_can_be_changed_and_its_file_stays(folder: Path, tmp_path: Path) -> None:
    weights = gguf_weights(GgufFile.open(convert(folder, tmp_path / "model.gguf")))
    tensor = weights.read("output.weight")
    assert isinstance(tensor, torch.Tensor)
    before = tensor.clone()
    tensor.zero_()
    assert torch.equal(read_plain(weights, "output.weight"), before)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", DECODED)
def test_other_kinds_are_decoded_and_named(
    wide: Path, tmp_path: Path, kind: str, kernels: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = convert(wide, tmp_path / "model.gguf", lambda name: kind if "ffn" in name else "Q8_0")
    with caplog.at_level(logging.WARNING, "speculant"):
        same_as_decoded(path, wide, tmp_path / "decoded", kernels)
    (line,) = [record.getMessage() for record in caplog.records]
    listed = f"q8_0 6 matrices, {kind.lower()} 3" if kernels == "reference" else f"{kind.lower()} 3 matrices"
    assert line.startswith(
        f"model.gguf: the {kernels} kernels decode some blocks, because they can't multiply by them: {listed}. "
    )


def test_kinds_that_cant_be_decoded_are_refused(wide: Path, tmp_path: Path) -> None:
    path = convert(wide, tmp_path / "model.gguf", "Q4_K")
    content = bytearray(path.read_bytes())
    name = b"blk.0.attn_norm.weight"
    place = content.index(name) + len(name) + 4 + 8  # after its one dimension
    content[place : place + 4] = (24).to_bytes(4, "little")  # I8, which is smaller than F32
    path.write_bytes(content)
    refused(path, "kinds that can't be decoded (blk.0.attn_norm.weight is I8)", "use a file of the model in Q4_K_M")


def test_kinds_in_blocks_are_those_of_the_kernels() -> None:
    assert set(SMALL_BLOCKS) | set(LARGE_BLOCKS) == {layout.upper() for layout in BLOCK_TYPES} - {
        "ZERO4",
        "ZERO8",
        "INT8",
        "FP8",
    }


# --- settings


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_are_not_rounded_again(folder: Path, tmp_path: Path, quantization: str) -> None:
    path = convert(folder, tmp_path / "model.gguf", "Q4_0")
    with pytest.raises(ConfigError, match=r"quantised already \(Q4_0\)[^$]*leave quantization out"):
        load_model(str(path), kernels="native", quantization=quantization)
    plain = convert(folder, tmp_path / "plain.gguf", "F16")
    expected = load_model(str(decoded(plain, folder, tmp_path / "out")), kernels="native", quantization=quantization)
    own = load_model(str(plain), kernels="native", quantization=quantization)
    assert torch.equal(logits(own), logits(expected))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_draft_s_blocks_are_rounded_again_as_their_numbers(folder: Path, tmp_path: Path, kind: str) -> None:
    """A table of blocks keeps its type: rows are looked up, so rounding it would save no time."""
    path = convert(folder, tmp_path / "model.gguf", lambda name: "F32" if name.startswith("token_embd") else kind)
    plain, own = (
        load_model(str(place), "float32", kernels="native", role="draft", quantization="int8")
        for place in (decoded(path, folder, tmp_path / "out"), path)
    )
    assert torch.equal(logits(own), logits(plain))
    path = convert(folder, tmp_path / "kept.gguf", kind)
    draft: Any = load_model(str(path), kernels="native", role="draft", quantization="int4").model
    assert draft.packed.table.type.name == kind


@pytest.mark.parametrize(
    ("entries", "ends"),
    [
        ({}, {256}),
        ({"tokenizer.ggml.eos_token_id": None}, set()),
        ({"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 4}, {256, 3, 4}),
        ({"tokenizer.ggml.eos_token_ids": [5, 7], "tokenizer.ggml.eot_token_id": 3}, {5, 7}),
        ({"tokenizer.ggml.eos_token_ids": [5, 10**6]}, "names the end token 1000000"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "names the end token 1000000"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "names the end token 'x'"),
        ({"tokenizer.ggml.eos_token_id": [256]}, "names the end token [256]"),
        ({"tokenizer.ggml.eom_token_id": [3, 4]}, "names the end token [3, 4]"),
    ],
    ids=str,
)
def test_end_tokens_are_read_from_the_metadata(
    folder: Path, tmp_path: Path, entries: dict[str, Any], ends: set[int] | str
) -> None:
    path = convert(folder, tmp_path / "model.gguf", metadata=entries)
    if isinstance(ends, str):
        refused(path, ends)
    else:
        assert load_model(str(path)).eos_token_ids == ends


@pytest.mark.parametrize(
    ("named", "kind", "ends"),
    [
        *((["<|im_end|>"], kind, [0]) for kind in (1, 3, 4, 6, None)),
        *((["</s>"], kind, [0] if kind in (3, None) else []) for kind in (1, 3, 4, 6, None)),
        (["<|end|>"], 3, [0]),
        (["<|end|>", "<|return|>", "<|call|>"], 3, [1, 2]),
        (["<|call|>", "<|end|>"], 1, [0, 1]),
    ],
    ids=str,
)
def test_tokens_end_a_text_by_their_names(file: GgufFile, named: list[str], kind: int | None, ends: list[int]) -> None:
    """They are special tokens of the tokenizer too."""
    tokens = [*named, *ALPHABET]
    entries = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": None if kind is None else [kind] * len(named) + [1] * 256,
        "tokenizer.ggml.eos_token_id": None,
    }
    own = with_entries(file, {**entries, "tokenizer.ggml.merges": [], "tokenizer.ggml.bos_token_id": None})
    assert read_gguf_config(own)["eos_token_id"] == ends
    added = read_gguf_tokenizer(own.metadata).backend.get_added_tokens_decoder()
    special = {index for index, token in added.items() if token.special}
    assert special == (set(range(len(named))) if kind == 3 else set(ends))


SAMPLING = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}


@pytest.mark.parametrize("names", [SAMPLING, ["temp"], []], ids=str)
def test_sampling_settings_are_those_of_the_metadata(folder: Path, tmp_path: Path, names: Iterable[str]) -> None:
    """Numbers in float32 are read in seven decimal digits."""
    path = convert(
        folder, tmp_path / "model.gguf", metadata={f"general.sampling.{name}": SAMPLING[name] for name in names}
    )
    own, keys = load_model(str(path)), {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    assert own.sampling == SamplingParams.from_mapping({keys.get(name, name): SAMPLING[name] for name in names})
    assert own.eos_token_ids == {END}
    assert own.generation.get("do_sample", False) == bool(names)


@pytest.mark.parametrize("given", [{"temp": -1.0}, {"top_p": 1.5}, {"min_p": float("nan")}, {"top_k": "x"}], ids=str)
def test_sampling_settings_out_of_range_are_refused(folder: Path, tmp_path: Path, given: dict[str, Any]) -> None:
    metadata = {f"general.sampling.{name}": value for name, value in given.items()}
    (name,) = given
    path = convert(folder, tmp_path / "model.gguf", metadata=metadata)
    refused(path, "model.gguf has metadata general.sampling.*", {"temp": "temperature"}.get(name, name))


def test_a_number_may_be_a_list_of_the_same_for_each_layer(folder: Path, tmp_path: Path) -> None:
    lists = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [64, 64]}
    own = load_model(str(convert(folder, tmp_path / "model.gguf", metadata=lists)))
    assert torch.equal(logits(own), logits(load_model(str(folder))))
    path = convert(folder, tmp_path / "other.gguf", metadata={"llama.attention.head_count_kv": [2, 4]})
    refused(path, "llama.attention.head_count_kv = [2, 4], and layers that differ are not implemented")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"general.architecture": "mamba"}, ("'mamba', which is not implemented", "gemma2, gemma3, gpt2")),
        ({"general.architecture": None}, ("the architecture None",)),
        ({"llama.block_count": None}, ("no metadata entry llama.block_count",)),
        ({"llama.block_count": 3}, ("has 3 layers and holds tensors of 2",)),
        ({"llama.attention.head_count": 0}, ("llama.attention.head_count = 0, not a whole number",)),
        ({"llama.attention.head_count": "4"}, ("llama.attention.head_count = '4'",)),
        ({"llama.attention.head_count": 3}, ("3 attention heads, not a multiple of 2",)),
        ({"llama.embedding_length": 33}, ("blk.0.attn_k.weight is [16, 32] but its metadata asks for [16, 33]",)),
        ({"llama.feed_forward_length": 65}, ("blk.0.ffn_down.weight is [32, 64]",)),
        ({"llama.rope.freq_base": -1.0}, ("llama.rope.freq_base = -1.0, not a positive number",)),
        ({"llama.rope.freq_base": float("nan")}, ("llama.rope.freq_base = nan",)),
        ({"llama.rope.dimension_count": 4}, ("rotary settings that are not implemented", "over 0.5 of each head")),
        ({"llama.rope.scaling.type": "dynamic"}, ("rope.scaling.type = 'dynamic', which is not implemented",)),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": "x"}, ("factor = 'x'",)),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}, ("yarn_ext_factor = 0.5",)),
        ({"llama.rope.scaling.type": "longrope"}, ("short_factor",)),
        ({"llama.attention.sliding_window": 16}, ("sliding window of 16 positions", "not implemented for llama")),
    ],
    ids=str,
)
def test_metadata_of_no_model_are_refused(
    folder: Path, tmp_path: Path, entries: dict[str, Any], words: tuple[str, ...]
) -> None:
    refused(convert(folder, tmp_path / "model.gguf", metadata=entries), *words)


OF_EIGHT: dict[str, tuple[Any, ...]] = {  # what changes nothing in a file with heads of 8
    "attention.scale": (0.0, float(np.float32(8**-0.5))),
    "attention.key_length_swa": (8,),
    "attention.value_length_swa": (8,),
    "rope.dimension_count_swa": (8,),
    "rope.freq_base_swa": (10000.0,),
}


@pytest.mark.parametrize("key", [*NEUTRAL, *OF_EIGHT])
def test_arithmetic_that_is_not_implemented_is_refused(file: GgufFile, key: str) -> None:
    name = f"llama.{key}"
    config = read_gguf_config(file)
    for value in {**NEUTRAL, **OF_EIGHT}[key]:
        assert read_gguf_config(with_entries(file, {name: value})) == config
    changed = {name: {"attention.causal": False, "hidden_activation": "gelu"}.get(key, 2)}
    changed |= {"llama.rope.scaling.factor": 2.0} if key == "rope.scaling.attn_factor" else {}  # it is read without
    experts = "has no metadata entry llama.expert_used_count"  # such a file is one of Mixtral
    expected = experts if key == "expert_count" else f"has {name} = {changed[name]!r}, which is not implemented"
    with pytest.raises(ModelError, match=expected):
        read_gguf_config(with_entries(file, changed))


def test_entries_of_no_effect_are_read_over(file: GgufFile) -> None:
    entries = {
        "llama.vocab_size": 7, "llama.expert_used_count": 0, "llama.rope.scaling.original_context_length": 64,
        "llama.rope.scaling.finetuned": True, "llama.rope.scaling.yarn_beta_fast": 32.0, "llama.pooling_type": 3,
        "llama.attention.layer_norm_epsilon": 1e-5, "llama.attention.sliding_window_pattern": [True, False],
        "qwen2.logit_scale": 2.0, "llama.something_new": [1, 2],
    }  # fmt: skip
    changed = with_entries(file, entries)
    plain, other = (read_gguf_decoder(each, read_gguf_config(each)) for each in (file, changed))
    assert plain == other


@pytest.mark.parametrize("kind", [None, "none", "linear"])
def test_the_factor_of_cosines_needs_no_scaling(file: GgufFile, kind: str | None) -> None:
    changed = with_entries(file, {"llama.rope.scaling.attn_factor": 1.25, "llama.rope.scaling.type": kind})
    assert read_gguf_decoder(changed, read_gguf_config(changed)).attention.rope == Rope(10000.0, scale=1.25)


def test_other_tensors_are_called_by_their_names_in_the_file(folder: Path, tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    refused(convert(folder, tmp_path / "model.gguf", extra=extra), "1 unexpected (blk.0.attn_sinks.weight)")
    content = (tmp_path / "model.gguf").read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_pu.weight")
    (tmp_path / "model.gguf").write_bytes(content)
    refused(tmp_path / "model.gguf", "1 missing (blk.1.ffn_up.weight)", "blk.1.ffn_pu.weight")


def test_a_file_that_has_become_shorter_is_an_error(folder: Path, tmp_path: Path) -> None:
    path = convert(folder, tmp_path / "model.gguf")
    weights = gguf_weights(GgufFile.open(path))
    copy = tmp_path / "short"
    shutil.copy(path, copy)
    path.write_bytes(copy.read_bytes()[:100])
    with pytest.raises(ModelError, match="can't be read"):
        weights.read("output.weight")
