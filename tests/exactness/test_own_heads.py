"""A Qwen3.5 target, whose layers have states, with a head of its own: no draft changes a text."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculant import LLM, SamplingParams
from speculant.kernels import usable_sets
from tests.commands import json_of
from tests.exactness.identity import Job, params_of, prompts_of
from tests.heads import write_with_head
from tests.models import HIDDEN_SIZE, VOCAB_SIZE

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
def test_a_chat_with_drafts_reads_as_few_tokens_as_without(target: str) -> None:
    """States are kept at the ends of turns, in whole blocks; the head knows its rows up to there, whatever the end."""
    engine = {"max_model_len": 128, "block_size": 4, "kv_memory": "64MiB", **ENGINES["float32"]}
    drafts: list[dict[str, Any]] = [{"use_speculative_decoding": False}, {"speculative_config": MTP}]
    plain, drafted = (LLM(target, draft_quantization=None, **engine, **own) for own in drafts)

    def chat(llm: LLM, length: int) -> tuple[list[int], list[int]]:
        text, cached = [length, *range(70, 90)], list[int]()
        for turn in range(3):
            params = SamplingParams(temperature=0.8, seed=turn, max_tokens=length, ignore_eos=True)
            (out,) = llm.generate([text], params)
            cached.append(out.metrics.cached_tokens)
            text = [*text, *out.outputs[0].token_ids, 100 + turn, 7]
        return text, cached

    for length in range(9, 13):
        assert chat(plain, length) == chat(drafted, length)


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


def test_doctor_names_the_head_in_the_files(target: str) -> None:
    findings = [str(json_of("doctor", model)["findings"]) for model in (target, "demo")]
    assert ["(method mtp)" in each for each in findings] == [True, False]


def test_the_head_of_a_model_that_reads_images_is_found(target: str, tmp_path: Path) -> None:
    """The language model is in text_config, and its names have a prefix."""
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
