"""The type of a draft's weights is chosen by measurement, kept on disk, and changes no text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from speculant import LLM, SamplingParams, files
from speculant.engine import (
    LargeDraft,
    Precision,
    choose_precision,
    draft_seconds,
    draft_vocabulary,
    keep_choice,
    precision,
)
from speculant.errors import ModelError
from speculant.lengths import measuring
from speculant.models import Checkpoint, TimesWeights, load_model
from speculant.text import Tokenizer
from tests.gguf_models import convert
from tests.models import Checkpoints

PARAMS = [SamplingParams(temperature=0, max_tokens=24), SamplingParams(seed=5, max_tokens=24)]
TYPES = ("int8", "int4")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "BUDGET_S", 0.02)
    return tmp_path / "speculant" / "costs"


def chosen_of(llm: LLM) -> str:
    return llm.speculation.partition("draft weights in ")[2].partition(" ")[0]


@pytest.mark.parametrize(
    ("acceptance", "token_s", "faster"), [(0.8, 0.1, True), (0.78, 0.1, True), (0.5, 0.1, False), (0.8, 0.3, False)]
)
def test_speed_weighs_acceptance_and_time(acceptance: float, token_s: float, faster: bool) -> None:
    whole, rounded = Precision(None, 0.8, 0.2), Precision("int8", acceptance, token_s)
    assert (rounded.speed(lambda rows: 1.0) > whole.speed(lambda rows: 1.0)) is faster


def test_speed_is_that_of_the_best_length() -> None:
    reached = [sum(0.8**place for place in range(length + 1)) for length in range(17)]
    expected = max(reached[length] / (1.0 + 0.1 * length + 0.2 * length) for length in range(1, 17))
    assert Precision(None, 0.8, 0.2).speed(lambda rows: 1.0 + 0.1 * (rows - 1)) == pytest.approx(expected)


def test_choice_changes_no_text(checkpoints: Checkpoints, kept: Path) -> None:
    arguments: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 2}
    plain = LLM(checkpoints.target, use_speculative_decoding=False, **arguments)
    auto = LLM(checkpoints.target, checkpoints.near, draft_quantization="auto", **arguments)
    assert chosen_of(auto) in (*TYPES, "float32")
    texts = [[out.outputs[0].token_ids for out in llm.generate(["def f", "import"], PARAMS)] for llm in (plain, auto)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "kept_text", ['{"draft_quantization": null, "spread": 1}', '{"draft_quantization": "int8", "spread": 1}']
)
def test_choice_is_kept_and_read_again(
    checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch, kept_text: str
) -> None:
    def load(quantization: str | None) -> Any:
        loaded.append(quantization)
        return load_model(checkpoints.near, "float32", role="draft", kernels="auto", quantization=quantization)

    loaded: list[str | None] = []
    target = load_model(checkpoints.target, "float32", kernels="auto").model
    choose_precision(target, load, ["pair"])
    (file,) = kept.glob("*.precision.json")
    if len(loaded) == 1:
        pytest.skip("the native kernels are not built")
    assert loaded == [None, *TYPES]
    file.write_text(kept_text)
    monkeypatch.setattr(precision, "timed", lambda *given: pytest.fail("it was measured again"))
    loaded.clear()
    assert choose_precision(target, load, ["pair"])[1] == json.loads(kept_text)["draft_quantization"] == loaded[0]
    assert len(loaded) == 1


def test_types_that_can_t_hold_the_weights_are_skipped(checkpoints: Checkpoints, kept: Path) -> None:
    def load(quantization: str | None) -> Any:
        if quantization is not None:
            raise ModelError("weights that are NaN can't be rounded", "download the checkpoint again.")
        return load_model(checkpoints.near, "float32", role="draft", kernels="auto")

    target = load_model(checkpoints.target, "float32", kernels="auto").model
    assert choose_precision(target, load, ["pair"])[1] is None


DAMAGED = (
    "", "[]", "{}", '{"draft_quantization": null}', '{"draft_quantization": "int3", "spread": 1}',
    '{"draft_quantization": 8, "spread": 1}',
)  # fmt: skip


@pytest.mark.parametrize(
    "damaged", [pytest.param(text, marks=[] if "int3" in text else pytest.mark.slow) for text in DAMAGED]
)
def test_choice_that_is_damaged_is_made_again(checkpoints: Checkpoints, kept: Path, damaged: str) -> None:
    arguments: dict[str, Any] = {"dtype": "float32", "draft_quantization": "auto"}
    LLM(checkpoints.target, checkpoints.near, **arguments)
    (file,) = kept.glob("*.precision.json")
    file.write_text(damaged)
    assert chosen_of(LLM(checkpoints.target, checkpoints.near, **arguments)) in (*TYPES, "float32")
    assert json.loads(file.read_text())["draft_quantization"] in (*TYPES, None)


def test_kernels_without_other_types_keep_the_draft(checkpoints: Checkpoints, kept: Path) -> None:
    llm = LLM(checkpoints.target, checkpoints.near, dtype="float64", draft_quantization="auto")
    assert "draft weights" not in llm.speculation, "nothing was chosen"


@pytest.mark.parametrize(("mask", "expected"), [(None, (0.5, 0.0)), (250, (0.1, 0.9))])
def test_a_draft_in_one_pass_costs_a_pass(
    mask: int | None, expected: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of tokens costs a pass for each, at 0.5 s here; rows of one pass cost 0.1 s each."""
    model = SimpleNamespace(mask_token=mask)
    monkeypatch.setattr(precision, "timed", lambda run, sizes, runs: {1: 0.5, 5: 2.5})
    monkeypatch.setattr(precision, "text_cache", lambda model, size, length: (None, None))
    monkeypatch.setattr(precision, "pass_seconds", lambda own, runs: lambda rows: 0.9 + 0.1 * rows)
    found = draft_seconds(cast(Checkpoint, SimpleNamespace(model=model)), 300, [])
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({None: 0.2, "int8": 0.1, "int4": 0.06}, "int4"),
        ({None: 0.2, "int8": 0.1, "int4": 0.1}, "int8"),
        ({None: 0.2, "int8": 0.2, "int4": 0.2}, None),
        ({None: 0.2, "int8": 0.3, "int4": 0.3}, None),
    ],
)
def test_large_draft_is_loaded_in_one_type(
    checkpoints: Checkpoints,
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[str | None, float],
    expected: str | None,
) -> None:
    """The type with the best time for its usual acceptance is chosen before weights are read."""
    target = load_model(checkpoints.target, "float32", kernels="auto")
    if not isinstance(target.backend, TimesWeights):
        pytest.skip("the native kernels are not built")

    def row_seconds(self: Any, config: Any, weights: Any, dtype: Any, quantizations: list[str | None]) -> list[float]:
        return [seconds[each] * config.num_layers for each in quantizations]

    monkeypatch.setattr(type(target.backend), "row_seconds", row_seconds)
    folder, loaded = Path(checkpoints.near), list[str | None]()
    assert LargeDraft.open(folder, target, "float32", None) is None, "it is small"
    monkeypatch.setattr(precision, "LARGE_BYTES", 0)
    large = LargeDraft.open(folder, target, "float32", None)
    assert large is not None

    def load(quantization: str | None) -> Any:
        loaded.append(quantization)
        return load_model(checkpoints.near, "float32", role="draft", kernels="auto", quantization=quantization)

    for _ in range(2):
        draft, chosen = choose_precision(target.model, load, ["pair"], large)
        assert chosen == expected
        assert draft.model.vocab_size
    assert not list(kept.glob("*.precision.json")), "the speeds are kept, see test_speeds.py"
    assert loaded == [expected] * 2


def test_one_tokenizer_is_read_once(checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft with the bytes of the target's tokenizer.json has its vocabulary."""
    target = load_model(checkpoints.target, "float32", kernels="auto")
    tokenizer = Tokenizer.load(Path(checkpoints.target))
    same, other = tmp_path / "same", tmp_path / "other"
    shutil.copytree(checkpoints.target, same)
    shutil.copytree(checkpoints.target, other)
    content = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(content, indent=7))
    monkeypatch.setattr(Tokenizer, "load", lambda place: pytest.fail("it was read"))
    assert draft_vocabulary(same, target, tokenizer) is None
    with pytest.raises(pytest.fail.Exception, match="it was read"):
        draft_vocabulary(other, target, tokenizer)


def test_one_vocabulary_of_two_gguf_files_is_read_once(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a family have the same tokens and merges, and may have other templates."""
    target = load_model(checkpoints.target, "float32", kernels="auto")
    end = "tokenizer.ggml.eos_token_id"
    entries = {"target": {}, "same": {"tokenizer.chat_template": "{{ messages }}"}, "other": {end: 3}}
    paths = {
        name: convert(checkpoints.target, tmp_path / f"{name}.gguf", metadata=own) for name, own in entries.items()
    }
    tokenizer = Tokenizer.load(paths["target"])
    monkeypatch.setattr(Tokenizer, "load", lambda place: pytest.fail("it was read"))
    assert draft_vocabulary(paths["same"], target, tokenizer) is None
    with pytest.raises(pytest.fail.Exception, match="it was read"):
        draft_vocabulary(paths["other"], target, tokenizer)


@pytest.mark.parametrize(("elapsed_s", "is_kept"), [(1.1, True), (2.0, False)])
def test_choice_of_a_busy_machine_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elapsed_s: float, is_kept: bool
) -> None:
    monkeypatch.setattr(files, "STEADY", 1.5)
    path = tmp_path / "choice.json"
    keep_choice(path, "int8", [[files.Run(elapsed_s, 1.0)] * 3])
    assert path.exists() == is_kept
    assert files.read_measured(path).get("draft_quantization") == ("int8" if is_kept else None)


def test_whatever_is_kept_with_costs_is_read_with_its_spread() -> None:
    """Costs, choices of types, and speeds: a busy machine's decide no later start."""
    package = Path(files.__file__).parent
    keeping = [path for path in package.rglob("*.py") if "costs_folder()" in path.read_text(encoding="utf-8")]
    assert {path.name for path in keeping} == {
        "files.py", "measuring.py", "precision.py", "speeds.py"
    }  # fmt: skip
    for path in keeping:
        text = path.read_text(encoding="utf-8")
        assert "read_measured(" in text, path
        assert "spread" in text, path
    assert [p.name for p in package.rglob("*.py") if 'cache_folder("costs")' in p.read_text(encoding="utf-8")] == [
        "files.py"
    ]
