"""Prompts: reproducible, of the given length, without special tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from speculant.config import EngineConfig, Limits
from speculant.engine import Runtime, build_engine
from speculant.errors import ConfigError, RequestError, SpeculantError
from speculant.lab.bench import (
    EDIT_LENGTH,
    OPENINGS,
    USUAL_LENGTH,
    Workload,
    WorkloadConfig,
    code_prompt,
    edit_prompt,
    make_workload,
    ordinary_ids,
    random_prompt,
    require_room,
    server_prompts,
)
from tests.models import BEGIN, END, Checkpoints, Shape, write_checkpoint

EIGHT = 8


@pytest.fixture(scope="module")
def runtime(checkpoints: Checkpoints) -> Runtime:
    return build_engine(EngineConfig(checkpoints.target))


@pytest.mark.parametrize("length", [None, 1, 7, 100])
def test_code_prompts_are_distinct_repeatable_and_of_the_length(runtime: Runtime, length: int | None) -> None:
    prompts = [code_prompt(runtime.tokenizer, index, length) for index in range(EIGHT)]
    assert prompts == [code_prompt(runtime.tokenizer, index, length) for index in range(EIGHT)]
    if length is not None:
        assert {len(prompt) for prompt in prompts} == {length}
    if length not in (1, 7):
        assert len({tuple(prompt) for prompt in prompts}) == EIGHT


def test_long_code_ends_with_an_opening(runtime: Runtime) -> None:
    for index in range(len(OPENINGS)):
        opening, long = (code_prompt(runtime.tokenizer, index, length) for length in (None, 200))
        assert long[-len(opening) :] == opening


def test_long_code_parses_like_code(runtime: Runtime) -> None:
    text = runtime.tokenizer.decode(code_prompt(runtime.tokenizer, 0, 2000))
    assert text.count("def ") > 5
    assert not {"{", "---"} & set(text.split())
    assert "{noun}" not in text


def test_tokens_before_every_text_are_kept(tmp_path: Path) -> None:
    tokenizer = build_engine(EngineConfig(write_checkpoint(tmp_path / "model"))).tokenizer
    tokenizer.backend.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", BEGIN)])
    for length in (None, 1, 2, 300):
        prompt = code_prompt(tokenizer, 0, length)
        assert prompt[0] == BEGIN
        assert BEGIN not in prompt[1:]
        assert length in (None, len(prompt))


def test_random_prompts_have_ordinary_tokens_alone(runtime: Runtime) -> None:
    workload = make_workload(WorkloadConfig("random", num_prompts=50, prompt_length=40), runtime, EIGHT)
    seen = {token for prompt in workload.prompts for token in prompt}
    assert len(workload.prompts) == 50
    assert {len(prompt) for prompt in workload.prompts} == {40}
    assert seen == set(range(END)), "2000 draws meet each of 256 bytes, and neither of the special tokens"
    assert len({tuple(prompt) for prompt in workload.prompts}) == 50


def test_end_tokens_are_avoided_even_if_they_are_ordinary_text(tmp_path: Path) -> None:
    runtime = build_engine(EngineConfig(write_checkpoint(tmp_path / "model", Shape(end=[5, END]))))
    ids = ordinary_ids(runtime.tokenizer, runtime.checkpoint.eos_token_ids)
    assert 5 not in ids
    assert len(ids) == 255
    assert 5 not in random_prompt(ids, 0, 5000)


def test_a_config_has_usual_numbers(runtime: Runtime) -> None:
    assert len(make_workload(WorkloadConfig(), runtime, EIGHT).prompts) == EIGHT
    [prompt] = make_workload(WorkloadConfig("random"), runtime, 1).prompts
    assert len(prompt) == USUAL_LENGTH


def test_a_text_file_has_one_prompt_per_line(runtime: Runtime, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("first prompt\n\nsecond\n")
    whole = make_workload(WorkloadConfig(str(path)), runtime, EIGHT)
    assert [runtime.tokenizer.decode(prompt) for prompt in whole.prompts] == ["first prompt", "second"]
    cut = make_workload(WorkloadConfig(str(path), num_prompts=1, prompt_length=5), runtime, EIGHT)
    assert [runtime.tokenizer.decode(prompt) for prompt in cut.prompts] == ["first"]


def test_files_that_are_missing_empty_or_short_are_explained(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "two.txt").write_text("a\nb\n")
    for name, number, problem in (
        ("absent", None, "can't be read"),
        ("empty.txt", None, "no prompts"),
        ("two.txt", 3, "2 prompts"),
    ):
        with pytest.raises(RequestError, match=problem):
            make_workload(WorkloadConfig(str(tmp_path / name), number), runtime, EIGHT)


@pytest.mark.parametrize("field", ["num_prompts", "prompt_length", "request_rate"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_above_zero(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        WorkloadConfig(**{field: value})


def test_arrivals_are_all_at_once_or_follow_a_rate(runtime: Runtime) -> None:
    """tests/unit/lab/bench/test_serving_load.py shows that they are a Poisson process."""
    assert not make_workload(WorkloadConfig(), runtime, EIGHT).arrivals
    times = make_workload(WorkloadConfig(request_rate=20.0), runtime, EIGHT).arrivals
    assert times == sorted(times)
    assert times[0] == 0.0
    assert len(times) == EIGHT


def test_a_workload_that_does_not_fit_is_refused() -> None:
    workload = Workload("code", [[1] * 10, [1] * 30])
    require_room(workload, 70, Limits(100, 1, 100))
    with pytest.raises(SpeculantError, match="30 tokens and 71") as caught:
        require_room(workload, 71, Limits(100, 1, 100))
    assert "max_tokens to 70" in caught.value.fix
    assert "prompt_length to 29" in caught.value.fix


def test_a_workload_describes_itself() -> None:
    assert Workload("code", [[1], [1] * 4, [1] * 3], request_rate=2.0).to_dict() == {
        "prompts": "code",
        "num_prompts": 3,
        "prompt_tokens": {"min": 1, "median": 3, "max": 4},
        "request_rate": 2.0,
        "sources": False,
    }


@pytest.mark.parametrize("length", [None, 1, 5, 60, 300])
def test_code_to_be_edited_begins_again(runtime: Runtime, length: int | None) -> None:
    prompts = [edit_prompt(runtime.tokenizer, index, length) for index in range(EIGHT)]
    assert {len(prompt) for prompt in prompts} == {length or EDIT_LENGTH}
    if length not in (1, 5):
        text = runtime.tokenizer.decode(prompts[0])
        whole, again = text.rsplit("\n\n\n", 1)
        assert whole.startswith(again)
        assert 0.4 < len(again) / len(whole) < 0.6


def write_categories(path: Path, *names: str) -> str:
    lines = [{"question_id": 1, "category": name, "turns": [f"{name} {place}"]} for place, name in enumerate(names)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_prompts_of_all_categories_are_taken_in_turn(runtime: Runtime, tmp_path: Path) -> None:
    source = write_categories(tmp_path / "bench.jsonl", "a", "a", "a", "b", "b", "c")
    workload = make_workload(WorkloadConfig(source, num_prompts=4), runtime, EIGHT)
    assert [runtime.tokenizer.decode(prompt) for prompt in workload.prompts] == ["a 0", "a 1", "b 3", "c 5"]
    assert workload.categories == ["a", "a", "b", "c"]
    assert make_workload(WorkloadConfig(source), runtime, EIGHT).categories == ["a", "a", "a", "b", "b", "c"]
    assert make_workload(WorkloadConfig(), runtime, EIGHT).categories == ()
    arriving = make_workload(WorkloadConfig(source, num_prompts=4, request_rate=2.0), runtime, EIGHT)
    first = arriving.first(2)
    assert (first.prompts, first.categories) == (workload.prompts[:2], ["a", "a"])
    assert first.arrivals == arriving.arrivals[:2]


def test_a_server_gets_texts_alone(tmp_path: Path) -> None:
    source = write_categories(tmp_path / "bench.jsonl", "a", "b")
    assert server_prompts(source, EIGHT) == ["a 0", "b 1"]
    assert len(set(map(str, server_prompts("code", EIGHT)))) == EIGHT
    for built_in in ("random", "edit"):
        with pytest.raises(RequestError, match=f"{built_in} prompts need the vocabulary"):
            server_prompts(built_in, EIGHT)
