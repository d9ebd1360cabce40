"""The checkpoints that load_model loads, those that it refuses, and its errors. Null entries count as absent."""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from speculant import plugins
from speculant.config import EngineConfig, resolve
from speculant.engine import build_engine, load_tokenizer
from speculant.errors import ConfigError
from speculant.models import OutputRules, load_model, resolve_source
from speculant.params import SamplingParams
from tests.unit.models.families import LLAMA3, SMALL, VARIANTS, Pair, Session, make_pair, random_tokens
from tests.unit.models.loaded import change_tensors, refused

pytestmark = pytest.mark.usefixtures("families_are_looked_up_once")
PROMPT = random_tokens(9)
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("llama"), "llama", "llama3.2")


@pytest.fixture
def folder(original: Pair, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(original.folder, tmp_path / "model")


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in {**content, **changes}.items() if value is not ...}))


def split_into_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    context = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in context.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in context.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_checkpoint_has_its_folder_s_metadata(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[5, 7], temperature=0.6)
    checkpoint = load_model(str(folder))
    assert checkpoint.eos_token_ids == {5, 7}
    assert checkpoint.generation["temperature"] == 0.6
    assert checkpoint.name == "model"
    assert checkpoint.folder == folder
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.dtype == torch.float32
    assert checkpoint.model.vocab_size == 61
    assert checkpoint.model.max_positions == 128
    assert not checkpoint.model.training
    assert not any(parameter.requires_grad for parameter in checkpoint.model.parameters())


def test_end_tokens_come_from_config_if_no_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=2)
    assert load_model(str(folder)).eos_token_ids == {2}
    edit(folder / "config.json", eos_token_id=None)
    assert load_model(str(folder)).eos_token_ids == frozenset()


BAD_ENDS = [-1, 61, 2**40, True, 2.0, "2", {"id": 2}, [2, -1], [[2]], [None]]


@pytest.mark.parametrize("ends", BAD_ENDS, ids=str)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_refuses_end_tokens_that_are_no_tokens(folder: Path, file: str, ends: Any) -> None:
    """Both files are checked, even the one that does not decide."""
    edit(folder / "generation_config.json", eos_token_id=2)
    edit(folder / file, eos_token_id=ends)
    refused(folder, f"{file} has eos_token_id", "from 0 to 60", f"correct {file}.")


@pytest.fixture(scope="module")
def original_seq2seq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an encoder-decoder model without a start token."""
    folder = make_pair(tmp_path_factory.mktemp("seq2seq"), "t5", "flan").folder
    for file in ("config.json", "generation_config.json"):
        edit(folder / file, decoder_start_token_id=None, bos_token_id=None, eos_token_id=None)
    return folder


@pytest.fixture
def seq2seq(original_seq2seq: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(original_seq2seq, tmp_path / "t5")


def test_the_start_token_is_read_as_transformers_reads_it(seq2seq: Path) -> None:
    assert load_model(str(seq2seq)).start_tokens == ()
    edit(seq2seq / "config.json", bos_token_id=5)
    assert load_model(str(seq2seq)).start_tokens == (5,)
    edit(seq2seq / "config.json", decoder_start_token_id=0)
    assert load_model(str(seq2seq)).start_tokens == (0,)
    edit(seq2seq / "generation_config.json", decoder_start_token_id=[4])
    assert load_model(str(seq2seq)).start_tokens == (4,)


def test_forced_tokens_and_bad_words_are_read(seq2seq: Path) -> None:
    assert load_model(str(seq2seq)).output_rules == OutputRules()
    edit(seq2seq / "config.json", forced_eos_token_id=1, bad_words_ids=[[9]])
    edit(seq2seq / "generation_config.json", eos_token_id=[1, 2], forced_bos_token_id=7)
    assert load_model(str(seq2seq)).output_rules == OutputRules(7, (1,), ((9,),))
    edit(seq2seq / "generation_config.json", forced_eos_token_id=[3, 4], bad_words_ids=[[1], [2, 1], [60]])
    assert load_model(str(seq2seq)).output_rules == OutputRules(7, (3, 4), ((2, 1), (60,)))


@pytest.mark.parametrize("words", [7, "x", [7], [[]], [[61]], [[1, -1]], [["a"]], [None], {}], ids=str)
def test_refuses_bad_words_that_are_no_tokens(seq2seq: Path, words: Any) -> None:
    edit(seq2seq / "generation_config.json", bad_words_ids=words)
    refused(seq2seq, "bad_words_ids", "correct generation_config.json.")


@pytest.mark.parametrize("key", ["decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"])
def test_refuses_forced_tokens_that_are_no_tokens(seq2seq: Path, key: str) -> None:
    edit(seq2seq / "config.json", **{key: 61})
    refused(seq2seq, f"config.json has {key} = 61", "from 0 to 60", "correct config.json.")


def test_a_decoder_has_no_start_tokens(folder: Path) -> None:
    edit(folder / "config.json", decoder_start_token_id=3, forced_bos_token_id=3)
    checkpoint = load_model(str(folder))
    assert (checkpoint.start_tokens, checkpoint.output_rules) == ((), OutputRules())


def test_a_text_may_be_longer_than_those_of_training(seq2seq: Path) -> None:
    edit(seq2seq / "config.json", n_positions=512)
    assert load_model(str(seq2seq)).model.max_positions == 2**15


def test_a_stack_whose_layers_are_missing_is_refused(seq2seq: Path) -> None:
    for layers in ({"num_layers": 4}, {"num_decoder_layers": 4}, {"num_layers": 2, "num_decoder_layers": 2}):
        edit(seq2seq / "config.json", **{"num_layers": 3, "num_decoder_layers": 3, **layers})
        refused(seq2seq, "layers")
    edit(seq2seq / "config.json", num_layers=3, num_decoder_layers=2)
    refused(seq2seq, "unexpected", "decoder.block.2.layer.0")


@pytest.mark.parametrize(
    "change",
    [{"temperature": "hot"}, {"top_p": 0}, {"top_k": 1.5}, {"min_p": float("nan")}, {"repetition_penalty": -1}],
    ids=str,
)
def test_refuses_sampling_settings_out_of_range(folder: Path, change: dict[str, Any]) -> None:
    edit(folder / "generation_config.json", do_sample=True, **change)
    refused(folder, "generation_config.json", *change)
    edit(folder / "generation_config.json", do_sample=False)
    load_model(str(folder))


def test_refuses_a_do_sample_that_is_neither_true_nor_false(folder: Path) -> None:
    edit(folder / "generation_config.json", do_sample="yes")
    refused(folder, "generation_config.json", "do_sample", "'yes'")


def test_sampling_settings_are_those_recommended(folder: Path) -> None:
    edit(folder / "generation_config.json", do_sample=True, temperature=0.6, top_k=None, top_p=0.9, max_length=20)
    assert load_model(str(folder)).sampling == SamplingParams(temperature=0.6, top_p=0.9)
    edit(folder / "generation_config.json", do_sample=False)
    assert load_model(str(folder)).sampling == SamplingParams()


def test_a_tied_head_is_one_tensor(folder: Path) -> None:
    model = load_model(str(folder)).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_shards(original: Pair, folder: Path) -> None:
    split_into_shards(folder)
    expected = Session(original.ours).extend(PROMPT)
    assert torch.equal(Session(load_model(str(folder)).model).extend(PROMPT), expected)


@pytest.mark.parametrize(
    ("stored", "dtype", "expected"),
    [
        ("float16", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("float32", "auto", torch.float32),
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
        ("float16", "float64", torch.float64),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_dtypes(folder: Path, stored: str, dtype: str, expected: torch.dtype, key: str | None) -> None:
    """With or without a type in config.json, under its old name and its new one."""
    kind = getattr(torch, stored)
    change_tensors(folder, lambda tensors: tensors.update({n: t.to(kind) for n, t in tensors.items()}))
    edit(folder / "config.json", **{"dtype": ..., **({key: stored} if key else {})})
    checkpoint = load_model(str(folder), dtype=dtype)
    assert checkpoint.dtype == expected
    assert {parameter.dtype for parameter in checkpoint.model.parameters()} == {expected}
    assert checkpoint.model.cache_shape.dtype == expected


def test_weights_do_not_follow_their_file(folder: Path) -> None:
    model = load_model(str(folder)).model
    before = Session(model).extend(PROMPT)
    change_tensors(folder, lambda tensors: tensors.update({n: t * 2 for n, t in tensors.items()}))
    assert torch.equal(Session(model).extend(PROMPT), before)


def test_harmless_extra_tensors_are_ignored(folder: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(folder, add)
    load_model(str(folder))


def test_code_beside_a_known_family_is_left_alone(folder: Path) -> None:
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Mine"})
    (folder / "modeling.py").write_text("raise SystemExit('this ran')")
    load_model(str(folder))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "lama"}, ("'lama'", "did you mean 'llama'", "mistral", "qwen2", "qwen3")),
        ({"model_type": "x", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, ("'x'", "auto_map", "never")),
        ({"quantization_config": {"quant_method": "hqq"}}, ("quantised",)),
        ({"num_hidden_layers": 2}, ("num_hidden_layers = 2", "3 layers")),
        ({"num_hidden_layers": 4}, ("num_hidden_layers = 4", "3 layers")),
        ({"head_dim": 8}, ("q_proj.weight is [64, 32]", "[32, 32]")),
        ({"num_key_value_heads": 4}, ("k_proj.weight is [32, 32]", "[64, 32]")),
        ({"vocab_size": 64}, ("embed_tokens.weight is [61, 32]", "[64, 32]")),
        ({"tie_word_embeddings": False}, ("tie_word_embeddings = false", "lm_head.weight")),
        ({"attention_bias": True}, ("missing", "q_proj.bias")),
        ({"num_key_value_heads": 3}, ("not a multiple",)),
        ({"head_dim": 15}, ("15",)),
        ({"hidden_size": ...}, ("hidden_size",)),
        ({"num_hidden_layers": "3"}, ("num_hidden_layers", "'3'")),
        ({"vocab_size": 0}, ("vocab_size = 0",)),
        ({"hidden_act": "mish"}, ("mish",)),
        ({"model_type": ...}, ("model_type",)),
        ({"rope_parameters": {"rope_type": "axial", "factor": 2.0}}, ("axial", "linear")),
        ({"rope_parameters": {"rope_type": "linear"}}, ("linear", "factor")),
        ({"partial_rotary_factor": 0.5}, ("0.5",)),
        ({"vocab_size": 2**62}, ("vocab_size",)),
        ({"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 2}, ("vocab_size",)),
        ({"head_dim": 2**31 - 2}, ("head_dim",)),
        ({"rms_norm_eps": "1e-6"}, ("rms_norm_eps", "'1e-6'")),
        ({"rms_norm_eps": -1e-6}, ("rms_norm_eps",)),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")),
        ({"rms_norm_eps": 1e30}, ("rms_norm_eps",)),
        ({"tie_word_embeddings": "no"}, ("tie_word_embeddings", "'no'")),
        ({"attention_bias": 1}, ("attention_bias",)),
        ({"mlp_bias": "false"}, ("mlp_bias",)),
        ({"hidden_act": ["silu"]}, ("hidden_act",)),
        ({"rope_parameters": None, "rope_theta": "abc"}, ("rope_theta", "'abc'")),
        ({"rope_parameters": None, "rope_theta": float("inf")}, ("rope_theta", "inf")),
        ({"rope_parameters": None, "rope_scaling": [1]}, ("rope_scaling", "[1]")),
        ({"rope_parameters": "llama3"}, ("rope_parameters",)),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}}, ("low_freq_factor", "high_freq_factor")),
        ({"rope_parameters": {**LLAMA3, "factor": 0}}, ("factor",)),
        ({"rope_parameters": {**LLAMA3, "factor": float("nan")}}, ("factor",)),
        ({"rope_parameters": {**LLAMA3, "original_max_position_embeddings": "8k"}}, ("original_max_position",)),
    ],
)
def test_a_config_contradicting_weights_or_itself_is_refused(
    folder: Path, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    edit(folder / "config.json", **change)
    refused(folder, *words)


@pytest.mark.parametrize("layers", [10**7, 2**31 - 1])
def test_layers_are_counted_before_any_is_made(folder: Path, layers: int) -> None:
    edit(folder / "config.json", num_hidden_layers=layers)
    started = time.process_time()
    refused(folder, f"num_hidden_layers = {layers}")
    assert time.process_time() - started < 1


def with_norm(tensor: Tensor) -> Callable[[Path], object]:
    """Replace the tensor of the last norm."""
    return lambda folder: change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": tensor}))


def with_another_head(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))


def with_another_name(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({"model.norm.gain": t.pop("model.norm.weight")}))


def cut_off(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def without_a_shard(folder: Path) -> None:
    split_into_shards(folder)
    (folder / "model-2.safetensors").unlink()


def with_an_index_that_points_outside(folder: Path) -> None:
    split_into_shards(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')


BROKEN: list[tuple[Callable[[Path], object], tuple[str, ...]]] = [
    (with_another_head, ("tie_word_embeddings", "differs")),
    (with_another_name, ("1 missing (model.norm.weight)", "1 unexpected (model.norm.gain)")),
    (with_norm(torch.ones(7)), ("model.norm.weight is [7]", "[32]")),
    (with_norm(torch.ones(32, dtype=torch.int8)), ("model.norm.weight is I8",)),
    (
        lambda folder: save_file({"model.norm.weight": torch.ones(32)}, folder / WEIGHTS),
        ("num_hidden_layers = 3", "0 layers"),
    ),
    (lambda folder: (folder / WEIGHTS).write_bytes(b"\x10\0\0\0\0\0\0\0 not a header"), (WEIGHTS,)),
    (cut_off, (WEIGHTS,)),
    (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        ("pickle", "pytorch_model.bin", "safetensors"),
    ),
    (lambda folder: (folder / WEIGHTS).unlink(), ("neither",)),
    (without_a_shard, ("model-2.safetensors", "index")),
    (with_an_index_that_points_outside, ("weight_map",)),
]


@pytest.mark.parametrize(("change", "words"), BROKEN, ids=[" ".join(words) for _, words in BROKEN])
def test_weights_that_are_not_the_model_s_are_refused(
    change: Callable[[Path], object], words: tuple[str, ...], folder: Path
) -> None:
    change(folder)
    refused(folder, *words)


def test_refuses_broken_files(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    refused(folder, "config.json", "JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, "config.json", "object")
    (folder / "config.json").write_text('{"a":' * 500 + "1" + "}" * 500)
    refused(folder, "config.json", "nested")
    (folder / "config.json").write_text('{"a":' * 10**5)
    refused(folder, "config.json", "JSON")
    (folder / "config.json").write_text('{"a": "\\ud800"}')
    refused(folder, "config.json", "Unicode")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    refused(folder, "config.json", "can't be read")
    (folder / "config.json").rmdir()
    refused(folder, "has no config.json")


def edit_shard(folder: Path, file: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def test_refuses_a_tensor_that_two_shards_hold(folder: Path) -> None:
    """The index names one of the two files; a program that reads them in turn would keep the other tensor."""
    split_into_shards(folder)
    norm = {"model.norm.weight": torch.zeros(32)}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (other,) = {"model-1.safetensors", "model-2.safetensors"} - {index["weight_map"]["model.norm.weight"]}
    edit_shard(folder, other, lambda tensors: tensors.update(norm))
    refused(folder, "model.norm.weight", "index")


def test_refuses_a_tensor_that_is_not_where_the_index_says(folder: Path) -> None:
    split_into_shards(folder)
    file = folder / "model.safetensors.index.json"
    weight_map = json.loads(file.read_text())["weight_map"]
    (other,) = {"model-1.safetensors", "model-2.safetensors"} - {weight_map["model.norm.weight"]}
    edit(file, weight_map={**weight_map, "model.norm.weight": other})
    refused(folder, "model.norm.weight", "index")
    del weight_map["model.norm.weight"]
    edit(file, weight_map=weight_map)
    refused(folder, "model.norm.weight", "index")


@pytest.mark.parametrize("source", ["~nobody-of-that-name/model", "x" * 5000, "\0"])
def test_refuses_a_path_that_can_t_be_looked_up(source: str) -> None:
    refused(source)


@pytest.mark.parametrize("source", ["./nowhere", "/no/such/folder", "a/b/c", "no spaces"])
def test_refuses_a_folder_that_is_not_there(source: str) -> None:
    refused(source, "no folder")


def test_refuses_a_file_as_a_folder(folder: Path) -> None:
    refused(folder / "config.json", "is a file")


def test_offline_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("some-org/never-downloaded", "HF_HUB_OFFLINE", "local folder")


def test_a_dead_network_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Never:
        raise ConnectionError("name resolution failed")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    refused("some-org/some-model", "could not be reached", "name resolution failed", "local folder")


def test_the_hub_is_asked_for_safe_files_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: asked.update(options) or folder)
    assert resolve_source("some-org/some-model", revision="v2") == folder
    assert asked["revision"] == "v2"
    assert not any("bin" in pattern or ".py" in pattern for pattern in asked["allow_patterns"])


def test_an_engine_s_models_come_from_the_named_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[Any, ...]] = []

    def download(name: str, **options: Any) -> Path:
        asked.append((name, options["revision"], options["cache_dir"]))
        return resolve_source("demo", "draft" if name == "org/draft" else "target")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = EngineConfig(
        "org/model",
        "org/draft",
        revision="v2",
        tokenizer="org/words",
        tokenizer_revision="v3",
        download_dir=str(tmp_path),
        draft_quantization=None,
        kernels="reference",
    )
    build_engine(config)
    folder = str(tmp_path)
    own = {("org/model", "v2", folder), ("org/words", "v3", folder), ("org/draft", None, folder)}
    assert set(asked) == own
    asked.clear()
    load_tokenizer(EngineConfig("org/model", revision="v2", tokenizer="org/words"), tmp_path)
    load_tokenizer(EngineConfig("org/model", revision="v2", tokenizer_revision="v4"), tmp_path)
    assert asked == [("org/words", None, None), ("org/model", "v4", None)]


def test_a_folder_comes_before_a_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert resolve_source("model").samefile(folder)


@pytest.mark.parametrize(("dtype", "advice"), [("float23", "float32"), ("int8", "bfloat16")])
def test_refuses_an_unknown_dtype(folder: Path, dtype: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        load_model(str(folder), dtype=dtype)


DEVICES = ["quantum", "", "meta", "xpu", "mps", "cpu:", "cpu:-1", "cpu:x", "cuda:1:1", "CPU", None, 0, ["cpu"]]


@pytest.mark.parametrize("device", DEVICES, ids=repr)
def test_refuses_a_device_that_models_cannot_run_on(folder: Path, device: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"device {device!r} is unknown")):
        load_model(str(folder), device=device)


@pytest.mark.parametrize("device", ["cpu:1", "cpu:99", "cuda:99", "cuda:999"])
def test_refuses_a_device_that_is_not_there(folder: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"{device}(.|\n)*torch sees [0-9]+ devices(.|\n)*device='cpu'"):
        load_model(str(folder), device=device)


def test_a_device_with_an_index_is_the_same_device(folder: Path) -> None:
    """Also for float16, which becomes float32 on every device."""
    change_tensors(folder, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    edit(folder / "config.json", dtype="float16")
    plain, indexed = (load_model(str(folder), device=device) for device in ("cpu", "cpu:0"))
    assert plain.dtype == indexed.dtype == torch.float32
    assert torch.equal(Session(plain.model).extend(PROMPT), Session(indexed.model).extend(PROMPT))


HELP = ("--quantization int4", 'quantization="int4"')


@pytest.fixture(scope="module")
def original_mistral(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("mistral"), "mistral", "v0.1")


@pytest.fixture
def mistral(original_mistral: Pair, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(original_mistral.folder, tmp_path / "model")


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_null_quantization_config_is_none(mistral: Path, key: str, original_mistral: Pair) -> None:
    edit(mistral / "config.json", **{key: None})
    assert Session(load_model(str(mistral)).model).greedy(PROMPT, 4) == Session(original_mistral.ours).greedy(PROMPT, 4)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"quantization_config": {"quant_method": "hqq", "bits": 4, "group_size": 128}}, "(hqq, 4 bits)"),
        ({"compression_config": {"quant_method": "sparseml", "bits": 8}}, "(sparseml, 8 bits)"),
        ({"quantization_config": {"quant_method": "fbgemm_fp8", "activation_scheme": "dynamic"}}, "(fbgemm_fp8)"),
        ({"quantization_config": {"load_in_8bit": True, "load_in_4bit": False}}, "(bitsandbytes, 8 bits)"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "(NVFP4)"),
        ({"quantization_config": {}}, "(quantization_config does not name the format)"),
        ({"quantization_config": [4]}, "(quantization_config does not name the format)"),
        ({"quantization_config": {"quant_method": {"name": "x"}, "bits": "4"}}, "({'name': 'x'})"),
    ],
    ids=str,
)
def test_a_quantised_checkpoint_is_called_by_its_format(mistral: Path, changes: dict[str, Any], name: str) -> None:
    edit(mistral / "config.json", **changes)
    refused(mistral, f"this checkpoint is quantised {name}", "unquantised", *HELP)


@pytest.mark.parametrize("family", ["mistral3", "ministral", "qwen2_moe", "llama4", "mixtral3", "lama"])
def test_an_unknown_family_is_not_taken_for_another(mistral: Path, family: str) -> None:
    """A similar name is no reason to load it as another family; a class that config.json names is one."""
    own = "".join(family.title().split("_")) + "ForCausalLM"
    for architectures in ([own], None, own, [3]):
        edit(mistral / "config.json", model_type=family, architectures=architectures)
        assert "did you mean" not in refused(mistral, repr(family), "these families: bart, cohere")
    edit(mistral / "config.json", architectures=["MistralForCausalLM"])
    refused(mistral, "did you mean 'mistral'?", "architectures")
    edit(mistral / "config.json", model_type="mistral")
    load_model(str(mistral))


@pytest.mark.parametrize("family", ["qwen2_moe", 3, None])
def test_a_null_auto_map_is_no_code(mistral: Path, family: Any) -> None:
    edit(mistral / "config.json", model_type=family, auto_map=None)
    assert "auto_map" not in refused(mistral, "model_type")


def test_null_key_heads_of_mistral_are_its_query_heads() -> None:
    """As in transformers 4; version 5 refuses null. An absent entry means 8."""
    read, shared = plugins.load("speculant.models", "mistral").read_config, {**SMALL, "model_type": "mistral"}
    assert read({**shared, "num_attention_heads": 16, "num_key_value_heads": None}).attention.kv_heads == 16
    del shared["num_key_value_heads"]
    assert read({**shared, "num_attention_heads": 16}).attention.kv_heads == 8


ROPE_BY_DEFAULT = ("gemma4_text", "ministral3")  # an object, even of nulls, replaces their rotary settings
NULLS = ["num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters", "sliding_window", "layer_types"]


@pytest.mark.parametrize("key", NULLS)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_null_sizes_are_those_of_transformers(family: str, key: str) -> None:
    if (family, key) == ("mistral", "num_key_value_heads"):
        pytest.skip("transformers 5 refuses it")
    hf = {**SMALL, "model_type": family, key: None}
    theirs = AutoConfig.for_model(**hf)
    ours = plugins.load("speculant.models", family).read_config(hf).attention
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert theirs.rope_parameters["rope_type"] == ours.rope.kind


@pytest.mark.parametrize(
    "entry",
    [
        {"hidden_act": None},
        {"rms_norm_eps": None},
        {"tie_word_embeddings": None},
        {"attention_bias": None},
        {"partial_rotary_factor": None},
        {"rope_scaling": {"rope_type": None, "type": None}},
        {"rope_parameters": {"rope_type": None, "partial_rotary_factor": None}},
        {"use_sliding_window": None},
    ],
    ids=str,
)
def test_null_entries_count_as_absent(entry: dict[str, Any]) -> None:
    (key,) = entry
    for family, variants in VARIANTS.items():
        read = plugins.load("speculant.models", family).read_config
        for name, own in variants.items():
            shared = {**SMALL, **own, "model_type": family}
            given = key in own or (key.startswith("rope") and family in ROPE_BY_DEFAULT)
            assert given or read({**shared, **entry}) == read(shared), f"{family}, {name}"


def test_a_null_factor_does_not_hide_another(mistral: Path) -> None:
    edit(mistral / "config.json", rope_scaling={"type": None, "partial_rotary_factor": None}, partial_rotary_factor=0.5)
    refused(mistral, "0.5")


def test_null_end_tokens_hide_no_others(mistral: Path) -> None:
    """A text without an end token would run up to its limit."""
    edit(mistral / "config.json", eos_token_id=7)
    edit(mistral / "generation_config.json", eos_token_id=None)
    assert load_model(str(mistral)).eos_token_ids == {7}


@pytest.mark.parametrize(("kind", "said"), [("dynamic", 1), ("linear", 0)])  # linear extends the context
def test_dynamic_rope_says_that_it_has_no_effect(
    mistral: Path, kind: str, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    edit(mistral / "config.json", rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0})
    with caplog.at_level(logging.WARNING, "speculant"):
        model = load_model(str(mistral)).model
    lines = [record.getMessage() for record in caplog.records if "dynamic rope scaling" in record.getMessage()]
    assert len(lines) == said
    assert all("no effect" in line and "128 positions" in line for line in lines)
    longest = 128 if kind == "dynamic" else 512
    assert resolve(EngineConfig(model="m", max_model_len=longest), model.max_positions).max_model_len == longest
    with pytest.raises(ConfigError, match=f"more than the {longest} positions"):  # where dynamic would have an effect
        resolve(EngineConfig(model="m", max_model_len=longest + 1), model.max_positions)


def test_null_does_not_excuse_a_missing_tensor(mistral: Path) -> None:
    edit(mistral / "config.json", tie_word_embeddings=None)
    change_tensors(mistral, lambda tensors: tensors.pop("lm_head.weight"))
    refused(mistral, "lm_head.weight")
