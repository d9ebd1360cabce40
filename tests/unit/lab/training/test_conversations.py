"""Tests of the texts that a target writes for training: conversations, interrupted runs and shared openings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from speculant.cli.main import app
from speculant.errors import ConfigError
from speculant.lab.training.config import HeadTrainingConfig
from speculant.lab.training.texts import FILE, Texts
from speculant.lab.training.written_texts import PART, PartialTexts, Turns, wanted_texts, write_conversations
from speculant.models.source import resolve_source
from speculant.text.tokenizer import Tokenizer

END = 9
TURNS = Turns(begin=[1, 2], asked=[3], answered=[4, 5])


def plan_of(out: Path, target: str = "demo", **changes: object) -> HeadTrainingConfig:
    """Return the plan of a short run."""
    given = {"steps": 1, "seq": 16, "tokens": 160, "chat": True, **changes}
    return HeadTrainingConfig(out, target, "medusa", **given)  # type: ignore[arg-type]


def test_turns_are_those_of_the_template() -> None:
    """The parts and the messages between them are the rendered conversation."""
    tokenizer = Tokenizer.load(resolve_source("demo", "target"))
    turns = Turns.of(tokenizer)
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, ("def f", "ok", "more"), strict=True)]
    words = [tokenizer.encode(each["content"], add_special_tokens=False) for each in messages]
    parts = [*turns.begin, *words[0], *turns.asked, *words[1], *turns.answered, *words[2], *turns.asked]
    assert tokenizer.decode(parts, skip_special_tokens=False) == tokenizer.apply_chat_template(messages)


def test_a_template_must_show_its_messages(tmp_path: Path) -> None:
    source = resolve_source("demo", "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    with pytest.raises(ConfigError, match="does not show"):
        Turns.of(Tokenizer.load(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(ConfigError, match="writes no conversations"):
        Turns.of(Tokenizer.load(tmp_path))


def test_a_conversation_has_turns_until_it_is_full() -> None:
    """The target writes each missing message, and the template's tokens replace its end token."""
    asked = list[tuple[list[list[int]], list[int], int]]()

    def go_on(texts: Sequence[list[int]], most: Sequence[int], turn: int) -> list[list[int]]:
        asked.append(([list(text) for text in texts], list(most), turn))
        return [[20 + turn] * min(3, size - 1) + [END] if size > 1 else [20 + turn] for size in most]

    texts = write_conversations(TURNS, [[], [7, 7]], 16, frozenset([END]), go_on)
    assert texts == [
        [1, 2, 20, 20, 20, 3, 21, 21, 21, 4, 5, 22, 22, 22, 3, 23],
        [1, 2, 7, 7, 3, 20, 20, 20, 4, 5, 21, 21, 21, 3, 22, 4],
    ]
    assert asked[0] == ([[1, 2], [1, 2, 7, 7, 3]], [4, 11], 0)  # a question is short; an answer has the rest
    assert [turn for _, _, turn in asked] == [0, 1, 2, 3]


def test_an_interrupted_run_keeps_its_texts(tmp_path: Path) -> None:
    """An unfinished line is dropped; other settings, data and numbers of texts are refused."""
    plan = plan_of(tmp_path)
    with PartialTexts.open(plan, 3) as texts:
        texts.add([[1] * 16, [2] * 16])
    with (tmp_path / PART).open("a") as file:
        file.write("[3, 3")
    others = [(plan_of(tmp_path, seed=2), 3), (plan_of(tmp_path, data=(Path("other"),)), 3), (plan, 2)]
    for other, count in others:
        with pytest.raises(ConfigError, match="other settings"), PartialTexts.open(other, count):
            pass
    with PartialTexts.open(plan, 3) as texts:
        assert texts.texts == [[1] * 16, [2] * 16]
        texts.add([[4] * 16])
    with PartialTexts.open(plan, 3) as texts:
        assert texts.texts == [[1] * 16, [2] * 16, [4] * 16]
        texts.finish()
    assert wanted_texts(plan, 4) is None
    assert not (tmp_path / PART).exists()


def test_damaged_texts_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / PART).write_bytes(b"\xff{\n")
    with pytest.raises(ConfigError, match=PART), PartialTexts.open(plan_of(tmp_path), 3):
        pass


def test_the_opening_of_all_texts_is_not_counted() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 5, 5, 6, 7, 8]])
    nothing = torch.zeros(2, 8, 1).half().numpy()
    assert Texts(tokens, nothing, 1).opening == 3
    assert Texts(tokens[:1], nothing[:1], 1).opening == 4  # half of a text


@pytest.mark.parametrize("kind", ["eagle3", "medusa", pytest.param("pass", marks=pytest.mark.slow)])
def test_a_head_learns_from_conversations(kind: str, tmp_path: Path) -> None:
    """From the command line; without data the target writes the questions too."""
    out, questions = tmp_path / "head", tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps({"turns": [f"def f{place}"]}) for place in range(4)))
    own = [] if kind == "eagle3" else ["--data", str(questions)]
    arguments = [
        "train", "head", "--kind", kind, "--target", "demo", "--chat", *own, "--out", str(out), "--tokens", "384",
        "--seq", "64", "--steps", "2", "--batch", "2", "--save-minutes", "0.00001", "--json",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "held-out sum min(p, q) by token" in result.stderr
    assert "conversations of 64 tokens" in (out / "README.md").read_text()
    tokenizer, tokens = Tokenizer.load(resolve_source("demo", "target")), load_file(out / FILE)["tokens"]
    turns = Turns.of(tokenizer)
    assert tokens.shape == (6, 64)
    assert tokens[:, : len(turns.begin)].tolist() == [turns.begin] * 6
    if own:
        held_out = tokenizer.encode("def f3", add_special_tokens=False)
        assert tokens[-1, len(turns.begin) :].tolist()[: len(held_out)] == held_out


def test_questions_are_files_of_several_prompts(tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("def f")
    two.write_text("def f\ndef g")
    for data, temperature, message in (
        (["--data", str(tmp_path)], "1", "is not a file"),
        (["--data", str(one)], "1", "1 of 1 questions"),
        (["--data", str(two)], "0", "10 texts would be 2 different ones"),
        ([], "0", "10 texts would be 1 different ones"),
    ):
        arguments = [
            "train", "head", "--kind", "medusa", "--target", "demo", "--chat", *data, "--out", str(tmp_path / "head"),
            "--tokens", "640", "--seq", "64", "--steps", "1", "--temperature", temperature,
        ]  # fmt: skip
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code
        assert message in str(result.exception)
