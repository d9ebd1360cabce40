"""Models that transformers computes: its own texts, with and without speculation, in both ways to run them."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from speculant import LLM, SamplingParams
from speculant.cache import paged_cache
from speculant.cli import app
from speculant.errors import ConfigError, ModelError
from speculant.models import (
    CachedDecoder,
    Checkpoint,
    Hidden,
    MaskRule,
    RecomputedDecoder,
    SequenceInput,
    attention,
    build_batch,
    growing_bounds,
    leaf_paths,
    load_model,
    row_errors,
    transformers as backend,
)
from speculant.types import DraftTree
from tests.models import VOCAB_SIZE, Checkpoints, write_tokenizer
from tests.transformers_folders import CACHED, FAMILIES, dtype_of, make_theirs, write_theirs

PROMPTS = ["def f(x): return x", "hello hello hello", "a"]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TOKENS = [5, 40, 33, 40, 97]
TYPICAL = ["stablelm", "gemma2", "gpt_oss", "bloom", "mamba"]  # of both ways
EACH = [pytest.param(each, marks=[] if each in TYPICAL else [pytest.mark.slow]) for each in FAMILIES]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def written(family: str, noise: float = 0.0) -> tuple[str, Any]:
        model = make_theirs(family, noise=noise)
        return write_theirs(tmp_path_factory.mktemp(family), model), model

    return written


def load(folder: str, family: str, **options: Any) -> Checkpoint:
    return load_model(folder, str(dtype_of(family)).removeprefix("torch."), model_backend="transformers", **options)


def engine(folder: str, family: str, **arguments: Any) -> LLM:
    arguments = {"model_backend": "transformers", "max_model_len": 96, "dtype": dtype_of(family), **arguments}
    return LLM(folder, **arguments)


def texts(llm: LLM, params: SamplingParams = GREEDY, prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def their_texts(model: Any, llm: LLM) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        tokens = torch.tensor([llm.tokenizer.encode(prompt)])
        text = model.generate(tokens, max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)
        found.append(text[0, tokens.shape[1] :].tolist())
    return found


@pytest.mark.parametrize("family", EACH)
def test_the_probe_chooses_how_a_family_runs(family: str, write: Any) -> None:
    checkpoint = load(write(family)[0], family)
    assert isinstance(checkpoint.model, CachedDecoder if family in CACHED else RecomputedDecoder)
    assert type(write(family)[1]).__name__ in checkpoint.kernels
    assert checkpoint.model.how in checkpoint.kernels
    assert not checkpoint.backend.row_invariant


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each == "stablelm" else [pytest.mark.slow]) for each in FAMILIES]
)
def test_greedy_text_is_that_of_transformers(family: str, write: Any) -> None:
    folder, theirs = write(family)
    llm = engine(folder, family)
    assert texts(llm) == their_texts(theirs, llm)


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["ngram", "chain", "tree"])
@pytest.mark.parametrize("family", [*TYPICAL[:1], pytest.param("gemma2", marks=pytest.mark.slow), *TYPICAL[2:]])
def test_drafts_change_no_greedy_text(family: str, method: str, write: Any) -> None:
    folder, theirs = write(family)
    drafted = {"method": "draft_model", "model": write(family, 0.05)[0]}
    ways = {
        "ngram": {"method": "ngram", "num_speculative_tokens": 4},
        "chain": {**drafted, "num_speculative_tokens": 4},
        "tree": {**drafted, "tree": [3, 2, 1]},
    }
    llm = engine(folder, family, speculative_config={"draft_length": "fixed", **ways[method]})
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == their_texts(theirs, llm)
    assert sum(output.metrics.speculative_decoding.num_draft_tokens for output in outputs) > 0
    accepted = sum(output.metrics.speculative_decoding.num_accepted_draft_tokens for output in outputs)
    assert accepted > 0 or method == "ngram"


@pytest.mark.parametrize("family", ["stablelm", pytest.param("mamba", marks=pytest.mark.slow)])
def test_drafts_change_no_seeded_text(family: str, write: Any) -> None:
    config = {"method": "draft_model", "model": write(family, 0.05)[0], "num_speculative_tokens": 4}
    llm = engine(write(family)[0], family, speculative_config=config)
    on = SamplingParams(seed=5, max_tokens=20, ignore_eos=True)
    off = SamplingParams(seed=5, max_tokens=20, ignore_eos=True, speculation=False)
    assert texts(llm, on) == texts(llm, off)


@pytest.mark.parametrize("family", ["cohere2", pytest.param("falcon", marks=pytest.mark.slow)])
def test_prefixes_are_used_again(family: str, write: Any) -> None:
    folder, theirs = write(family)
    llm = engine(folder, family, speculative_config={"method": "ngram", "num_speculative_tokens": 3}, block_size=4)
    assert texts(llm) == their_texts(theirs, llm)
    again = llm.generate(PROMPTS, GREEDY)
    assert again[0].metrics.cached_tokens >= 8
    assert [list(output.outputs[0].token_ids) for output in again] == their_texts(theirs, llm)


@pytest.mark.parametrize("family", [pytest.param("opt", marks=pytest.mark.slow), "bloom"])
def test_preempted_requests_continue(family: str, write: Any) -> None:
    folder, theirs = write(family)
    position = load(folder, family).model.cache_shape.bytes_per_token
    llm = engine(
        folder, family, max_model_len=48, kv_memory=52 * position, block_size=4, enable_prefix_caching=False,
        max_num_batched_tokens=8, speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )  # fmt: skip
    outputs = llm.generate(PROMPTS, GREEDY)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [list(output.outputs[0].token_ids) for output in outputs] == their_texts(theirs, llm)


@pytest.mark.slow
def test_a_target_and_a_draft_may_have_different_backends(write: Any, checkpoints: Checkpoints) -> None:
    config = {"method": "draft_model", "num_speculative_tokens": 3}
    own = LLM(checkpoints.target, dtype="float64", kernels="reference", max_model_len=96)
    for target, draft in (("transformers", "auto"), ("auto", "transformers"), ("transformers", None)):
        named = {**config, "model": checkpoints.near, "model_backend": draft}
        llm = engine(checkpoints.target, "stablelm", model_backend=target, speculative_config=named)
        assert texts(llm) == texts(own)
        assert ("target is computed by transformers" in llm.speculation) == (target == "transformers")
        assert ("draft is computed by transformers" in llm.speculation) == (draft != "auto")


@pytest.mark.slow
def test_a_draft_may_lack_tokens(tmp_path: Path, write: Any) -> None:
    """Tokens that the draft does not have are read as another one, and never drawn."""
    folder, theirs = write("stablelm")
    target = Path(shutil.copytree(folder, tmp_path / "target"))
    write_tokenizer(target, added=["<more>", "<most>"])
    config = {"method": "draft_model", "model": write("stablelm", 0.05)[0], "num_speculative_tokens": 3}
    llm = engine(str(target), "stablelm", speculative_config=config)
    assert "the draft lacks 2 of the target's tokens" in llm.speculation
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logit_bias={258: 100.0}, min_tokens=1)
    off = dataclasses.replace(params, speculation=False)
    assert texts(llm) == their_texts(theirs, llm)
    assert texts(llm, params) == texts(llm, off)


def test_a_draft_may_draw_some_tokens_alone(write: Any) -> None:
    folder, _ = write("stablelm")
    hidden = forward(load(folder, "stablelm").model).last
    every, some = (load(folder, "stablelm", head_tokens=tokens).model.logits(hidden) for tokens in ((), (3, 5)))
    assert torch.equal(some[:, [3, 5]], every[:, [3, 5]])
    assert torch.isinf(some).sum(-1).eq(VOCAB_SIZE - 2).all()


# --- how a model runs


def test_a_wrong_attention_is_noticed(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, theirs = write("stablelm")
    exact = attention
    monkeypatch.setattr(backend, "attention", lambda *given: 1.001 * exact(*given))
    llm = engine(folder, "stablelm")
    assert "without a cache: each pass computes whole texts again, because its logits differ" in llm.kernels
    assert texts(llm) == their_texts(theirs, llm)


@pytest.mark.parametrize(("factor", "kind"), [(1.0, CachedDecoder), (1.5, RecomputedDecoder)])
def test_the_probe_works_in_bfloat16(factor: float, kind: type, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = attention
    monkeypatch.setattr(backend, "attention", lambda *given: factor * exact(*given))
    for family in ("stablelm", "gpt_oss"):
        model = load_model(write(family)[0], "bfloat16", model_backend="transformers").model
        assert isinstance(model, kind)


def test_errors_of_rows() -> None:
    wanted = torch.tensor([[1.0, -torch.inf], [2.0, -4.0], [3.0, 0.0]])
    assert row_errors(wanted, wanted).tolist() == [0, 0, 0]
    found = torch.tensor([[1.0, -torch.inf], [2.0, -3.0], [torch.nan, 0.0]])
    assert row_errors(found, wanted).tolist() == [0, 0.25, torch.inf]


def test_a_cache_of_wrong_positions_is_noticed(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule of its window a model differs once a text is longer than the window."""
    monkeypatch.setattr(MaskRule, "__call__", lambda _rule, rows, keys: rows[:, None] >= keys[None, :])
    assert isinstance(load(write("cohere2")[0], "cohere2").model, RecomputedDecoder)


def test_an_unknown_argument_of_attention_is_not_ignored(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_PLAIN", frozenset({"dropout"}))
    checkpoint = load(write("gemma2")[0], "gemma2")
    assert isinstance(checkpoint.model, RecomputedDecoder)
    assert "its attention has the argument" in checkpoint.kernels


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        initializer_range=0.5,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="BertLMHeadModel of transformers is no causal language model"):
        load_model(str(tmp_path), model_backend="transformers")


def test_leaf_paths() -> None:
    assert leaf_paths([]) == [[]]
    assert leaf_paths([-1, 0, 1]) == [[0, 1, 2]]
    assert leaf_paths([-1, -1, 0, 2, 0]) == [[1], [0, 2, 3], [0, 4]]


# --- hidden states


@pytest.mark.parametrize("family", ["stablelm", "mamba"])
def test_taps_are_the_states_that_enter_layers(family: str, write: Any) -> None:
    folder, theirs = write(family)
    hidden = forward(load(folder, family).model, (0, 1))
    expected = theirs(torch.tensor([TOKENS]), output_hidden_states=True, use_cache=False).hidden_states
    for tap, states in zip((0, 1), hidden.taps, strict=True):
        assert torch.allclose(states, expected[tap][0])
    assert torch.allclose(hidden.last, expected[-1][0])


@pytest.mark.parametrize("tap", [2, 3])
def test_states_that_transformers_does_not_return_are_refused(tap: int, write: Any) -> None:
    model = load(write("stablelm")[0], "stablelm").model
    with pytest.raises(ConfigError, match=f"hidden states of (the )?layers? {tap}"):
        forward(model, (tap,))


def test_rows_may_have_embeddings_of_their_own(write: Any) -> None:
    model = load(write("stablelm")[0], "stablelm").model
    own = {1: model.embed(torch.tensor(TOKENS))[1]}
    given = SequenceInput(1, [TOKENS[0], 0, *TOKENS[2:]], DraftTree.empty(), own)
    assert torch.allclose(forward(model, given=given).last, forward(model).last)


def test_a_model_without_a_cache_reads_no_embeddings(write: Any) -> None:
    model = load(write("mamba")[0], "mamba").model
    own = {1: model.embed(torch.tensor(TOKENS))[1]}
    with pytest.raises(ModelError, match="can't read input embeddings"):
        forward(model, given=SequenceInput(1, TOKENS, DraftTree.empty(), own))


@torch.inference_mode()
def forward(model: Any, taps: Sequence[int] = (), given: SequenceInput | None = None) -> Hidden:
    cache = paged_cache(model.cache_shape, 8, 4)
    inputs = given or SequenceInput(1, TOKENS, DraftTree.empty())
    return cast(Hidden, model.forward(build_batch([inputs], cache, torch.device("cpu")), cache.storage, taps))


# --- refusals, and what users are told


def test_the_extra_is_named_where_it_is_missing(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        LLM(write("stablelm")[0], model_backend="transformers")
    assert 'pip install "speculant[transformers]" -c constraints.txt' in caught.value.fix


def test_an_unknown_family_names_this_backend(write: Any) -> None:
    with pytest.raises(ModelError) as caught:
        LLM(write("mamba")[0])
    assert 'model_backend="transformers"' in caught.value.fix


def test_the_choice_is_never_made_alone(checkpoints: Checkpoints) -> None:
    assert "transformers" not in load_model(checkpoints.target, kernels="auto").kernels


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "int8"}, "rounded to int8"),
        ({"weight_packing": "12bit"}, "weight_packing='12bit'"),
        ({"model_backend": "transformer"}, "model_backend='transformer' is unknown"),
    ],
)
def test_options_that_have_no_meaning_are_refused(options: dict[str, Any], words: str, write: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        load_model(write("stablelm")[0], **{"model_backend": "transformers", **options})


def test_missing_weights_are_refused(tmp_path: Path, write: Any) -> None:
    """transformers would draw them at random."""
    folder = Path(shutil.copytree(write("stablelm")[0], tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights of StableLmForCausalLM.*model\.layers\.1\.mlp\.up_proj"):
        load(str(folder), "stablelm")


def test_a_folder_that_transformers_does_not_know_is_refused(tmp_path: Path, write: Any) -> None:
    folder = Path(shutil.copytree(write("stablelm")[0], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mine", "auto_map": {"AutoConfig": "m.C"}}))
    (folder / "m.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ModelError, match="transformers can't load"):
        load(str(folder), "stablelm")


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(32))
    with pytest.raises(ModelError, match="reads folders alone"):
        load_model(str(tmp_path / "model.gguf"), model_backend="transformers")


def test_loading_says_that_it_is_slower(write: Any, caplog: pytest.LogCaptureFixture) -> None:
    load(write("stablelm")[0], "stablelm")
    (record,) = [each for each in caplog.records if each.name.startswith("speculant") and each.levelname == "WARNING"]
    assert "slower than Speculant's own kernels, and a row's last bits depend on the batch" in record.getMessage()


def test_doctor_shows_how_it_runs(write: Any) -> None:
    result = CliRunner().invoke(app, ["doctor", write("mamba")[0], "--model-backend", "transformers", "--json"])
    report = json.loads(result.stdout)
    assert "MambaForCausalLM, without a cache" in report["kernels"]["in_use"]
    assert report["kernels"]["each_position_kib"] == 16 / 1024
    assert any("slower" in str(finding) for finding in report["findings"])


def test_rope_that_grows_with_the_text_bounds_the_context() -> None:
    values = {"original_max_position_embeddings": 32, "rope_type": "dynamic"}
    assert growing_bounds(values, object(), 128) == [32]
    assert growing_bounds({**values, "rope_type": "yarn"}, object(), 128) == []
    assert growing_bounds({"full_attention": {"rope_type": "dynamic"}}, object(), 128) == [128]
