"""`speculant quantize`: its files hold the weights that an engine computes with, and others can read them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from speculant import LLM, SamplingParams
from speculant.cli import app
from speculant.errors import ConfigError, ModelError, SpeculantError
from speculant.gguf_file import GgufFile
from speculant.kernels import usable_sets
from speculant.lab.quantize import TYPES, quantize
from speculant.models import (
    CheckpointFiles,
    QuantizedBlocks,
    load_model,
    read_gguf_config,
    read_plain,
    resolve_source,
    tensor_shapes,
)
from speculant.text import Tokenizer, read_gguf_tokenizer
from tests.gguf_models import convert
from tests.models import ALPHABET, Shape, write_checkpoint
from tests.unit.models.families import VARIANTS, make_pair
from tests.unit.models.test_gguf_families import STORED, pair_of
from tests.unit.text.test_sentencepiece import T5 as T5_PIECES, model as spiece, write_t5 as write_t5_tokenizer

pytestmark = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
TEXTS = ["def read(path):", "Once upon a time"]
PARAMS = [SamplingParams(temperature=0, max_tokens=24), SamplingParams(temperature=0.8, seed=3, max_tokens=24)]
DEMO = resolve_source("demo", "target")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that is smaller than DEMO, and whose matrices every type divides into blocks."""
    path = tmp_path_factory.mktemp("small") / "model"
    write_checkpoint(path, Shape(hidden_size=256, end=257), tokens=[*ALPHABET, "re"])
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["merges"] = [["r", "e"]]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return path


def written(source: Path, out: Path, type_: str, **arguments: Any) -> Path:
    names = list[str]()
    size = quantize(source, out, type_, names.append, **arguments)
    files = [out] if out.is_file() else list(out.iterdir())
    assert size == sum(file.stat().st_size for file in files)
    assert names, "the progress names tensors"
    assert [file.name for file in out.parent.iterdir() if file.name.startswith(".")] == [], "nothing temporary is left"
    return out


@pytest.fixture(scope="module")
def demo_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what writes DEMO as a file of a type, once."""
    return cache(lambda type_: written(DEMO, tmp_path_factory.mktemp(type_) / "demo.gguf", type_))


def texts(model: Path, **arguments: Any) -> list[list[int]]:
    llm = LLM(str(model), **{"kernels": "native", "weight_cache": None, **arguments})
    return [out.outputs[0].token_ids for out in llm.generate(TEXTS, PARAMS)]


@pytest.mark.parametrize("type_", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_file_gives_the_text_of_rounding_at_load(demo_in: Callable[[str], Path], type_: str) -> None:
    file = demo_in(type_)
    plain = texts(file)
    assert plain == texts(DEMO, quantization=type_)
    assert texts(file, draft_model="demo", draft_quantization=type_, spec_length=3) == plain


@pytest.mark.parametrize("type_", TYPES)
def test_a_file_holds_the_model(demo_in: Callable[[str], Path], type_: str) -> None:
    file = demo_in(type_)
    before, after = CheckpointFiles.open(DEMO), CheckpointFiles.open(file)
    assert after.decoder.layers[0].attention.heads == before.decoder.layers[0].attention.heads
    assert tensor_shapes(after.decoder) == tensor_shapes(before.decoder)
    for name in before.weights.names():
        old, new = read_plain(before.weights, name).float(), read_plain(after.weights, name).float()
        assert torch.equal(old, new) if old.dim() == 1 else 0 < float((new - old).norm() / old.norm()) < 0.1, name
    own, other = Tokenizer.load(DEMO), Tokenizer.load(file)
    assert all(own.encode(text) == other.encode(text) for text in (*TEXTS, "naïve 123\n\n\tx<|endoftext|>"))


def test_readers_of_ggml_find_the_same_numbers(demo_in: Callable[[str], Path]) -> None:
    file = demo_in("int4")
    reader, ours = gguf.GGUFReader(file), CheckpointFiles.open(file).tensors
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32", "Q4_K", "Q5_K", "Q5_1", "Q6_K"}
    for tensor in reader.tensors:
        plain = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).view(tuple(tensor.shape[::-1]))
        assert torch.equal(read_plain(ours, tensor.name), plain)


@pytest.mark.parametrize(("type_", "kind", "most"), [("int4", "zero4", 0.1), ("int8", "zero8", 0.01)])
def test_a_folder_holds_the_model(small: Path, tmp_path: Path, type_: str, kind: str, most: float) -> None:
    folder = written(small, tmp_path / "small", type_)
    before, after = CheckpointFiles.open(small), CheckpointFiles.open(folder)
    for name in before.weights.names():
        old, stored = read_plain(before.weights, name).float(), after.weights.read(name)
        if name.startswith("model.layers") and old.dim() == 2:
            assert isinstance(stored, QuantizedBlocks)
            assert stored.layout == kind
            assert 0 < float((read_plain(after.weights, name) - old).norm() / old.norm()) < most, name
        else:
            assert torch.equal(read_plain(after.weights, name).float(), old)
    assert (folder / "tokenizer.json").read_bytes() == (small / "tokenizer.json").read_bytes()
    assert texts(folder) == texts(folder, draft_model=str(small), spec_length=3)


def test_folders_are_packed_as_compressed_tensors_defines(tmp_path: Path) -> None:
    folder = written(DEMO, tmp_path / "demo", "int4")
    tensors, module = load_file(folder / "model.safetensors"), "model.layers.0.mlp.down_proj"
    packed, scale, zeros, shape = (
        tensors[f"{module}.weight_{part}"] for part in ("packed", "scale", "zero_point", "shape")
    )
    n, k = shape.tolist()
    shifts = torch.arange(0, 32, 4)
    q = (packed[..., None] >> shifts & 15).view(n, -1)[:, :k]
    zero = (zeros[:, None] >> shifts[:, None] & 15).reshape(-1, k // 32)[:n]
    plain = scale.float().repeat_interleave(32, 1) * (q - zero.repeat_interleave(32, 1))
    assert torch.equal(plain, read_plain(CheckpointFiles.open(folder).weights, f"{module}.weight"))
    options = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert options["ignore"] == ["model.embed_tokens"]


def wide_t5(folder: Path, **settings: Any) -> Path:
    """Write a T5 whose matrices every type divides into blocks, with its own kind of tokenizer."""
    own = {"feed_forward_proj": "gated-gelu", "d_model": 256, "d_kv": 64, "d_ff": 256, "eos_token_id": 1, **settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VARIANTS, "t5", {"wide": {**VARIANTS["t5"]["flan"], **own, "hidden_size": 256}})
        source = make_pair(folder, "t5", "wide").folder
    write_t5_tokenizer(source, spiece([*T5_PIECES, ("<x>", 0.0, 4)]))
    return source


@pytest.mark.parametrize("stored", ["tokenizer.json", "spiece.model"])
def test_a_file_holds_an_encoder_and_a_unigram_tokenizer(tmp_path: Path, stored: str) -> None:
    source = wide_t5(tmp_path / "t5")
    if stored == "tokenizer.json":
        Tokenizer.load(source).backend.save(str(source / stored))
        (source / "spiece.model").unlink()
    file = written(source, tmp_path / "t5.gguf", "int4")
    prompts = ["the hello in", "a\nfi"]
    params = SamplingParams(temperature=0, max_tokens=12)
    made = [LLM(str(source), quantization="int4", kernels="native"), LLM(str(file), kernels="native")]
    one, other = ([out.outputs[0].token_ids for out in llm.generate(prompts, params)] for llm in made)
    assert one == other
    metadata = dict(GgufFile.open(file).metadata)
    del metadata["tokenizer.huggingface.json"]
    own, read = Tokenizer.load(source), read_gguf_tokenizer(metadata).backend
    for text in (*prompts, "the<x> naive", "", "\u4e16\u754c", "</s>a"):
        assert read.encode(text).ids == own.encode(text)
    assert read.get_vocab() == own.vocab()


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        (
            {"feed_forward_proj": "gated-silu"},
            "dense_act_fn = 'silu', feed_forward_proj = 'gated-silu', and",
        ),
        ({"relative_attention_max_distance": 64}, "relative_attention_max_distance = 64, and a GGUF"),
    ],
)
def test_a_file_that_would_be_read_otherwise_is_refused(settings: dict[str, Any], fact: str, tmp_path: Path) -> None:
    source = wide_t5(tmp_path / "t5", **settings)
    begun = list[str]()
    with pytest.raises(ModelError, match=fact):
        quantize(source, tmp_path / "t5.gguf", "int4", begun.append)
    assert begun == [], "no weights were rounded"
    assert [path.name for path in tmp_path.iterdir()] == ["t5"]


@pytest.mark.parametrize("scaled", [True, False])
def test_a_file_has_the_scale_of_logits(scaled: bool, tmp_path: Path) -> None:
    """Only a head in the file says that logits are not scaled, so that one is written even if it is the table."""
    source = wide_t5(tmp_path / "t5")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "scale_decoder_outputs": scaled}))
    file = written(source, tmp_path / "t5.gguf", "int4")
    own, read = (CheckpointFiles.open(place).decoder.head.scale for place in (source, file))
    assert own == read == (256**-0.5 if scaled else 1.0)


@pytest.mark.parametrize(
    ("generation", "ends"),
    [
        ({"eos_token_id": [7, 0, 9, 11, 30]}, {7, 0, 9, 11, 30}),
        ({"eos_token_id": 7, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01}, {7}),
        ({"do_sample": True, "repetition_penalty": 1.05}, None),
        ({"do_sample": False, "temperature": 0.6}, None),
        ({"do_sample": True}, None),
    ],
)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_generation_is_the_same(
    small: Path, tmp_path: Path, generation: dict[str, Any], ends: set[int] | None, kind: str
) -> None:
    source = shutil.copytree(small, tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps(generation))
    out = written(source, tmp_path / ("out.gguf" if kind == "file" else "out"), "int8")
    own, read = (load_model(str(place)) for place in (source, out))
    assert own.eos_token_ids == read.eos_token_ids == (own.eos_token_ids if ends is None else ends)
    assert own.sampling == read.sampling


def test_a_file_has_the_end_tokens_of_its_source_alone(small: Path, tmp_path: Path) -> None:
    """Other readers find end tokens by their names, too, or read up to three."""
    source = shutil.copytree(small, tmp_path / "source")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    named = next(text for text, index in vocab.items() if index == 9)
    vocab["<|endoftext|>"] = vocab.pop(named)
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "tokenizer_config.json").unlink()
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0, 3]}))
    file = written(source, tmp_path / "out.gguf", "int8")
    assert load_model(str(file)).eos_token_ids == {7, 0, 3}
    metadata = GgufFile.open(file).metadata
    first, *others = (metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom"))
    assert (metadata["tokenizer.ggml.eos_token_ids"], {first, *others}) == ([7, 0, 3], {7, 0, 3})
    nameless = {**metadata, "tokenizer.ggml.eos_token_ids": None}
    assert 9 in read_gguf_config(replace(GgufFile.open(file), metadata=nameless))["eos_token_id"]


def test_templates_and_roles_are_the_same(small: Path, tmp_path: Path) -> None:
    source = shutil.copytree(small, tmp_path / "source")
    templates = [{"name": "default", "template": "a{{ bos_token }}"}, {"name": "tool_use", "template": "b"}]
    roles = {"eos_token": "b", "bos_token": "a", "mask_token": {"content": "c"}}
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates, "eos_token": "b"}))
    (source / "special_tokens_map.json").write_text(json.dumps(roles))
    read = Tokenizer.load(written(source, tmp_path / "out.gguf", "int8"))
    assert [read.template_for(tools) for tools in (False, True)] == ["a{{ bos_token }}", "b"]
    assert {role: read.special_token(role) for role in roles} == {"eos_token": "b", "bos_token": "a", "mask_token": "c"}


def test_characters_are_composed_as_in_the_source(small: Path, tmp_path: Path) -> None:
    """Qwen's tokenizers begin with this step."""
    source = shutil.copytree(small, tmp_path / "source")
    content = json.loads((source / "tokenizer.json").read_text())
    (source / "tokenizer.json").write_text(json.dumps({**content, "normalizer": {"type": "NFC"}}))
    own, read = (Tokenizer.load(each) for each in (source, written(source, tmp_path / "out.gguf", "int8")))
    assert read.encode("e\u0301") == own.encode("e\u0301") == own.encode("\u00e9")


def test_a_tokenizer_that_would_be_another_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculant.lab.quantize.gguf.find_template", lambda *_: "another")
    source = shutil.copytree(small, tmp_path / "source")
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "own"}))
    with pytest.raises(ModelError, match=r"the tokenizer has chat_template = .*'own'.*, which a GGUF file can't hold"):
        quantize(source, tmp_path / "out.gguf", "int8", list[str]().append)
    assert not (tmp_path / "out.gguf").exists()


def test_a_file_is_made_from_a_file(tmp_path: Path) -> None:
    plain = convert(DEMO, tmp_path / "plain.gguf", "BF16", metadata={"general.name": "a name"})
    file = written(plain, tmp_path / "demo.gguf", "int4")
    assert texts(file) == texts(plain, quantization="int4")
    old, new = (dict(GgufFile.open(path).metadata) for path in (plain, file))
    assert {name: value for name, value in new.items() if name in old} == old


def test_tensors_that_no_layer_uses_are_left_out(small: Path, tmp_path: Path) -> None:
    source = shutil.copytree(small, tmp_path / "source")
    tensors = load_file(source / "model.safetensors") | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert written(source, tmp_path / "a.gguf", "q4_0").read_bytes() == (
        written(small, tmp_path / "b.gguf", "q4_0").read_bytes()
    )


def test_places_are_safe(small: Path, tmp_path: Path) -> None:
    file = written(small, tmp_path / "small.gguf", "q4_0")
    content = file.read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        quantize(small, file, "int4", list[str]().append)
    with pytest.raises(ModelError, match="quantised"):
        quantize(file, tmp_path / "again.gguf", "int8", list[str]().append)
    with pytest.raises(ConfigError, match="the model itself"):
        quantize(small, small, "int4", list[str]().append, replace=True)
    assert file.read_bytes() == content
    written(small, file, "int8", replace=True)
    assert file.read_bytes() != content
    folder = written(small, tmp_path / "folder", "int4")
    with pytest.raises(ConfigError, match="exists"):
        quantize(small, folder, "int4", list[str]().append)
    written(small, folder, "int8", replace=True)


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    source = shutil.copytree(DEMO, tmp_path / "source")
    (source / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="tokenizer.json"):
        quantize(source, tmp_path / "out.gguf", "int4", list[str]().append)
    with pytest.raises(ModelError, match="q8_0 is a format of GGUF files"):
        quantize(source, tmp_path / "out", "q8_0", list[str]().append)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "family": ({"model_type": "glm4"}, {}, "'glm4' are not written as GGUF"),
    "settings": ({"hidden_act": "relu"}, {}, "hidden_act = 'relu', and a GGUF file of its family has no key for it"),
    "normalizer": ({}, {"normalizer": {"type": "Lowercase"}}, "not a byte-level BPE"),
    "merges": ({}, {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}, "not a byte-level BPE"),
    "unigram": ({}, {"model": {"type": "Unigram", "vocab": [], "unk_id": 0}}, "another way than T5's"),
    "split": ({}, {"pre_tokenizer": {"type": "Metaspace"}}, "the step 'Metaspace'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_file_can_not_hold_is_refused(tmp_path: Path, change: str) -> None:
    source = shutil.copytree(DEMO, tmp_path / "source")
    config, tokenizer, message = CHANGES[change]
    for name, changes in (("config.json", config), ("tokenizer.json", tokenizer)):
        content = json.loads((source / name).read_text())
        (source / name).write_text(json.dumps({**content, **changes}))
    with pytest.raises(ModelError, match=message) as caught:
        quantize(source, tmp_path / "out.gguf", "int4", list[str]().append)
    assert "folder" in caught.value.fix


def test_command(tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["quantize", *arguments], catch_exceptions=True)

    out = tmp_path / "demo.gguf"
    told = run("demo", str(out))
    assert told.exit_code == 0, told.output
    assert "MiB in" in told.output
    assert f"speculant bench quality demo {out} --text FILE" in told.output.replace("\n", "")
    assert isinstance(run("demo", str(out)).exception, SpeculantError)
    facts = json.loads(run("demo", str(out), "--force", "--type", "int8", "--json").stdout)
    assert facts["bytes"] == out.stat().st_size
    assert isinstance(run("demo", str(out), "--type", "int5").exception, ConfigError)


@pytest.mark.parametrize("family", STORED)
def test_files_of_families(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are stacked, matrices transposed, and rows in another order. These checkpoints have no tokenizer."""
    monkeypatch.setattr("speculant.lab.quantize.gguf.text_entries", lambda *_: {})
    monkeypatch.setattr("speculant.lab.quantize.folder.check_tokenizer", lambda *_: None)
    (source := tmp_path / "source").mkdir()
    pair_of(source, family, next(iter(STORED[family])))
    file = written(source, tmp_path / "model.gguf", "int8")
    before, after = CheckpointFiles.open(source).weights, CheckpointFiles.open(file).weights
    assert set(after.names()) == set(before.names())
    for name in before.names():
        old, new = read_plain(before, name).float(), read_plain(after, name).float()
        assert float((new - old).norm() / old.norm()) < 0.01, name
    assert {after.kind(name) for name in after.names()} == {"F32", "Q8_0"}
