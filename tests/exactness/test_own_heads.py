"""A Qwen3.5 target, whose layers have states, with a head of its own: no draft changes a text."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculant import LLM, SamplingParams, plugins
from speculant.drafting import HeadFolder, method_within
from speculant.errors import CapacityError, ModelError, PairError, SpeculantError
from speculant.gguf_file import GgufFile
from speculant.kernels import usable_sets
from speculant.lab.quantize import quantize, read_folder
from speculant.models import CheckpointFiles, load_model
from tests.commands import json_of
from tests.drafters import model_of
from tests.exactness.identity import Job, params_of, prompts_of
from tests.gguf_models import behind, convert, converted
from tests.heads import write_mtp, write_with_head
from tests.models import HIDDEN_SIZE, VOCAB_SIZE
from tests.unit.models.test_gguf_mutations import content_of, mutated

pytestmark = pytest.mark.usefixtures("one_thread")

ENGINES = {
    "reference": {"dtype": "float64", "kernels": "reference"},
    **({name: {"dtype": name, "kernels": "native"} for name in ("float32", "bfloat16")} if usable_sets() else {}),
}

MTP = {"method": "mtp", "num_speculative_tokens": 3}
native = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
MEMORY = {"reference": "740KiB", "float32": "370KiB", "bfloat16": "345KiB"}  # less than all sequences need


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_with_head(tmp_path_factory.mktemp("qwen3_5"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_with_head(tmp_path_factory.mktemp("qwen3_5_moe"), "qwen3_5_moe")


@pytest.mark.parametrize("model", ["target", "experts"])
@pytest.mark.parametrize("distribution", ["greedy", "seeded"])
@pytest.mark.parametrize("engine", ENGINES)
def test_texts_are_those_of_plain_decoding(
    request: pytest.FixtureRequest, model: str, engine: str, distribution: str
) -> None:
    """Random heads: nearly every draft is rejected."""
    params = params_of(4, 16)[distribution]
    job = Job(
        request.getfixturevalue(model),
        prompts_of(4),
        (HIDDEN_SIZE, VOCAB_SIZE),
        {"max_model_len": 32, **ENGINES[engine]},
    )
    plain = job.plain(params)
    for batch, length in ((4, 3), (1, 5)):
        config = {**MTP, "num_speculative_tokens": length}
        texts, drafted, accepted = job.generate(params, speculative_config=config, max_num_seqs=batch)
        assert texts == plain
        assert drafted > accepted


@pytest.mark.parametrize("engine", ENGINES)
def test_preempted_samples_and_prefixes_have_the_same_texts(target: str, engine: str) -> None:
    arguments = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 6, **ENGINES[engine]}
    params = [SamplingParams(n=3, seed=5, max_tokens=40, ignore_eos=True), *params_of(3, 40)["seeded"]]
    prompts = [[*range(70, 90), place] for place in (7, 8, 9, 10)]

    def written(memory: str, **own: Any) -> tuple[list[list[int]], int, LLM]:
        llm = LLM(target, kv_memory=memory, **arguments, **own)
        found = [llm.generate(prompts, params) for _ in range(2)]
        texts = [[[*each.token_ids] for out in outputs for each in out.outputs] for outputs in found]
        assert texts[0] == texts[1]
        return texts[0], min(out.metrics.cached_tokens for out in found[1]), llm

    drafting = {"speculative_config": MTP, "draft_quantization": None}
    plain, *_ = written("64MiB", use_speculative_decoding=False)
    drafted, cached, _ = written("64MiB", **drafting)
    assert (drafted, cached) == (plain, 20), "all but the newest token of a prompt are known"
    drafted, _, llm = written(MEMORY[engine], **drafting)
    assert drafted == plain
    assert llm.engine.metrics.preemptions > 0
    assert llm.engine.metrics.drafter_errors == 0


@native
@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["mtp", "eagle", "eagle3", "peagle", "dflash", "medusa", "modules"])
def test_a_chat_with_drafts_reads_as_few_tokens_as_without(target: str, tmp_path: Path, method: str) -> None:
    """States are kept at the ends of turns, in whole blocks; the head knows its rows up to there, whatever the end."""
    engine = {"max_model_len": 128, "block_size": 4, "kv_memory": "8MiB", **ENGINES["float32"]}
    if method == "modules":
        head: dict[str, Any] = {"draft_model": write_mtp(tmp_path, HIDDEN_SIZE, VOCAB_SIZE, num_layers=3, modules=2)}
    else:
        head = {} if method == "mtp" else {"draft_model": model_of(method, "", HIDDEN_SIZE, VOCAB_SIZE)}
    config = {"method": "mtp" if method == "modules" else method, "num_speculative_tokens": 3}
    plain = LLM(target, draft_quantization=None, use_speculative_decoding=False, **engine)
    drafted = LLM(target, draft_quantization=None, speculative_config=config, **head, **engine)

    def chat(llm: LLM, length: int) -> tuple[list[int], list[int]]:
        text, cached = [length, *range(70, 90)], list[int]()
        for turn in range(3):
            params = SamplingParams(temperature=0.8, seed=turn, max_tokens=length, ignore_eos=True)
            (out,) = llm.generate([text], params)
            cached.append(out.metrics.cached_tokens)
            text = [*text, *out.outputs[0].token_ids, 100 + turn, 7]
        return text, cached

    for length in range(9, 13):
        (text, known), (own, found) = chat(plain, length), chat(drafted, length)
        assert own == text
        assert found == known, length


@native
def test_a_head_s_experts_may_have_names_of_their_own(experts: str, tmp_path: Path) -> None:
    target = shutil.copytree(experts, tmp_path / "apart")
    tensors = load_file(target / "model.safetensors")
    of = "mtp.layers.0.mlp.experts"
    inner, down = tensors.pop(f"{of}.gate_up_proj"), tensors.pop(f"{of}.down_proj")
    for index, both in enumerate(inner):
        for part, own in zip(("gate", "up", "down"), (*both.chunk(2), down[index]), strict=True):
            tensors[f"{of}.{index}.{part}_proj.weight"] = own.clone()
    save_file(tensors, target / "model.safetensors")
    params = params_of(2, 12)["greedy"]
    jobs = [Job(str(each), prompts_of(2), (HIDDEN_SIZE, VOCAB_SIZE), ENGINES["float32"]) for each in (experts, target)]
    stacked, apart = (job.generate(params, speculative_config=MTP, draft_quantization="none") for job in jobs)
    assert apart == stacked


@native
def test_the_head_is_used_by_default_beside_lookups(target: str) -> None:
    params = params_of(4, 24)["greedy"]
    job = Job(target, prompts_of(4), (HIDDEN_SIZE, VOCAB_SIZE), ENGINES["float32"])
    texts, *_ = job.generate(params)
    assert texts == job.plain(params)
    said = LLM(target, **ENGINES["float32"]).speculation
    assert said.startswith("suffix, prompt_lookup, mtp (method fallback), adaptive length, with the target's own head")


@native
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"speculative_config": {"method": "mtp"}}, "mtp, adaptive length"),
        ({"spec_length": 2}, "mtp, 2 tokens a step, with the target's own head"),
        ({"speculative_config": {"method": "fallback"}}, "suffix, prompt_lookup (method fallback), adaptive length"),
        ({"speculative_config": {"members": ["suffix"]}}, "suffix (method fallback, no draft model is named)"),
        ({"use_speculative_decoding": False}, "use_speculative_decoding is False"),
    ],
)
def test_settings_of_drafts_decide_whether_the_head_is_used(target: str, given: dict[str, Any], said: str) -> None:
    assert LLM(target, **ENGINES["float32"], **given).speculation.startswith(said)


@native
def test_a_head_that_can_t_be_used_is_told_and_left_out(
    target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(target, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["mtp.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert LLM(str(folder), **ENGINES["float32"]).speculation.startswith("suffix, prompt_lookup (")
    assert "own head is not used" in caplog.text
    assert "1 missing (norm.weight)" in caplog.text


@native
def test_memory_for_the_target_alone_leaves_the_head_out(target: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments = {"max_model_len": 256, "max_num_seqs": 2, **ENGINES["float32"]}
    assert LLM(target, kv_memory="200KiB", **arguments).speculation.startswith("suffix, prompt_lookup (")
    assert "own head is not used: the drafter's cache: 1 x 256 positions" in caplog.text
    with pytest.raises(CapacityError, match="the drafter's cache"):
        LLM(target, kv_memory="200KiB", speculative_config=MTP, **arguments)


def test_doctor_names_the_head_in_the_files(target: str, file: str) -> None:
    findings = [str(json_of("doctor", model)["findings"]) for model in (target, file, "demo")]
    assert ["(method mtp)" in each for each in findings] == [True, True, False]


# --- GGUF files


@pytest.fixture(scope="module")
def file(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(convert(target, tmp_path_factory.mktemp("qwen35") / "model.gguf"))


@pytest.mark.parametrize("form", [{}, {"fused": True}, {"kind": "Q8_0"}])
def test_a_file_has_the_head_of_its_checkpoint(target: str, tmp_path: Path, form: dict[str, Any]) -> None:
    path = convert(target, tmp_path / "model.gguf", **form)
    own, found = (HeadFolder.open(str(each), "mtp", among=True) for each in (target, path))
    assert {name for name in own.names() if name.startswith("mtp.")} == set(found.names())
    for name in found.names():
        assert found.shape(name) == own.shape(name)
        torch.testing.assert_close(found.read(name), own.read(name), rtol=0, atol=0.02 if "kind" in form else 1e-6)


@native
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_head_of_a_file_is_used_by_default(target: str, tmp_path: Path, kind: str) -> None:
    path = str(convert(target, tmp_path / "model.gguf", kind))
    job = Job(path, prompts_of(2), (HIDDEN_SIZE, VOCAB_SIZE), ENGINES["float32"])
    params = params_of(2, 16)["greedy"]
    assert ", mtp (method fallback)" in LLM(path, **ENGINES["float32"]).speculation
    texts, drafted, _ = job.generate(params, speculative_config=MTP)
    assert texts == job.plain(params)
    assert drafted > 0


@native
@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (("shared_head_norm",), ", mtp (method fallback)"),  # it has the model's
        (("eh_proj",), "suffix, prompt_lookup (method fallback"),
        (("ffn_up", "attn_q_norm"), "2 missing (layers.0.mlp.up_proj.weight, layers.0.self_attn.q_norm.weight)"),
    ],
)
def test_a_file_without_some_tensors_of_its_head(
    file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: tuple[str, ...], words: str
) -> None:
    opened = GgufFile.open(Path(file))
    names = {name for name in opened.tensors if name.startswith("blk.3.") and name.split(".")[-2] in lost}
    kept = replace(opened, tensors={name: each for name, each in opened.tensors.items() if name not in names})
    assert len(names) == len(lost)
    monkeypatch.setattr(GgufFile, "open", lambda path: kept)
    assert words in LLM(file, **ENGINES["float32"]).speculation + caplog.text


@pytest.mark.parametrize(
    ("name", "shape"),
    [("nextn.eh_proj", (64, 32)), ("attn_qkv", (32, 32)), ("ffn_down", ()), ("nextn.enorm", (0,)), ("ffn_gate", ())],
)
def test_a_file_with_a_head_of_other_sizes_is_refused(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, ...]
) -> None:
    opened = GgufFile.open(convert(target, tmp_path / "model.gguf", fused=True))
    places = {**opened.tensors, f"blk.3.{name}.weight": replace(opened.tensors[f"blk.3.{name}.weight"], shape=shape)}
    if name == "ffn_gate":  # without it, ffn_up holds both
        del places[f"blk.3.{name}.weight"]
    changed = replace(opened, tensors=places)
    monkeypatch.setattr(GgufFile, "open", lambda path: changed)
    with pytest.raises(PairError, match="the head in .* does not fit the target"):
        plugins.load("speculant.drafting", "mtp").load(
            HeadFolder.open(str(opened.path), "mtp", among=True), load_model(target).model
        )


def test_a_damaged_head_is_refused(file: str, target: str, tmp_path: Path) -> None:
    content, header = content_of(Path(file))
    path, model, made = tmp_path / "model.gguf", load_model(target).model, 0
    for seed in range(200):
        path.write_bytes(mutated(content, header, random.Random(seed)))
        method_within(path, 3)
        with suppress(SpeculantError):
            plugins.load("speculant.drafting", "mtp").load(HeadFolder.open(str(path), "mtp", among=True), model)
            made += 1
    assert 0 < made < 100


@native
def test_a_file_of_the_head_alone_is_a_draft_model(target: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's conversion has an option for it."""
    opened, open_ = GgufFile.open(Path(file)), GgufFile.open
    kept = {name: each for name, each in opened.tensors.items() if not name.startswith(("blk.0.", "blk.1.", "blk.2."))}
    alone = replace(opened, tensors=kept)
    monkeypatch.setattr(GgufFile, "open", lambda path: alone if path == opened.path else open_(path))
    config = {"method": "mtp", "model": file, "num_speculative_tokens": 2}
    assert LLM(target, speculative_config=config, **ENGINES["float32"]).speculation.startswith("mtp, 2 tokens a step")
    with pytest.raises(ModelError, match="holds tensors of 1 layers .*\n.*name it as the draft model, with its method"):
        LLM(target, draft_model=file, **ENGINES["float32"])


def test_a_written_file_has_the_head(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculant.lab.quantize.gguf.text_entries", lambda *_: {})
    monkeypatch.setattr("speculant.lab.quantize.folder._check", lambda *_: None)
    folder = Path(target)
    written, decoder = read_folder(folder), CheckpointFiles.open(folder).decoder
    expected = converted(behind(load_file(folder / "model.safetensors"), 3), "qwen3_5_text", decoder)
    assert written.tensors.keys() == expected.keys()
    assert all(torch.equal(each.read(), expected[name]) for name, each in written.tensors.items())
    entries = {name: each.value for name, each in written.entries.items()}
    assert [entries[f"qwen35.{key}"] for key in ("block_count", "nextn_predict_layers")] == [4, 1]
    assert entries["qwen35.attention.recurrent_layers"] == [True, False, True, False]
    assert quantize(folder, tmp_path / "model.gguf", "int8", lambda name: None)
    assert method_within(tmp_path / "model.gguf", 3) == "mtp"


@native
def test_a_folder_with_rounded_layers_keeps_its_head(target: str, tmp_path: Path) -> None:
    assert quantize(Path(target), tmp_path / "int4", "int4", lambda name: None)
    assert CheckpointFiles.open(tmp_path / "int4").tensors.quantised_kinds() == ["ZERO4"]
    assert ", mtp (method fallback)" in LLM(str(tmp_path / "int4")).speculation


def test_the_head_of_a_model_that_reads_images_is_found(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The language model is in text_config, and its names have a prefix; a GGUF file has its text alone."""
    monkeypatch.setattr("speculant.lab.quantize.gguf.text_entries", lambda *_: {})
    folder = Path(shutil.copytree(target, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": config}))
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace("model.", "model.language_model."): each for name, each in tensors.items()}
    save_file({**named, "model.visual.patch.weight": torch.zeros(2)}, folder / "model.safetensors")
    job = Job(str(folder), prompts_of(2), (HIDDEN_SIZE, VOCAB_SIZE), ENGINES["reference"])
    params = params_of(2, 6)["greedy"]
    texts, drafted, _ = job.generate(params, speculative_config=MTP)
    assert texts == replace(job, target=target).plain(params)
    assert drafted > 0
    assert read_folder(folder).tensors.keys() == read_folder(Path(target)).tensors.keys()
