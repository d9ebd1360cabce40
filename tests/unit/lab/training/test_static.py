"""`speculant train static`, from text files to drafts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from speculant import LLM, SamplingParams
from speculant.cli import app
from speculant.drafting import BigramTables
from speculant.errors import ConfigError, ModelError
from speculant.text import Tokenizer
from tests.encoder_decoders import make_t5, write_t5
from tests.models import BEGIN, END, VOCAB_SIZE, Checkpoints, checkpoints
from tests.unit.lab.training.runs import command

__all__ = ["checkpoints"]


train = partial(command, "static")


def test_static_tables_are_trained_and_used(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Tables made from the model's output, as text or as token ids, draft parts of it again."""
    llm = LLM(checkpoints.target, dtype="float64")
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (plain,) = llm.generate("class A:", params)
    (tmp_path / "a.txt").write_text("class A:" + plain.outputs[0].text, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(
        json.dumps(plain.outputs[0].token_ids) + "\n\n" + json.dumps({"token_ids": plain.outputs[0].token_ids}) + "\n"
    )
    out = tmp_path / "tables.safetensors"
    counted = train(tmp_path / "a.txt", tmp_path / "b.jsonl", "--tokenizer", checkpoints.target, "--out", out)
    assert counted["vocab_size"] == VOCAB_SIZE
    assert counted["tokens"] >= 2 * 60 + len("class A:")
    assert counted["bytes"] == out.stat().st_size
    drafting = LLM(
        checkpoints.target,
        dtype="float64",
        speculative_config={
            "method": "static",
            "tables": str(out),
            "num_speculative_tokens": 3,
            "draft_length": "fixed",
        },
    )
    (drafted,) = drafting.generate("class A:", params)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics.speculative_decoding.num_accepted_draft_tokens > 10


def test_static_tables_keep_the_given_number_of_continuations(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab ac ad ae ab" * 3)
    out = tmp_path / "t.safetensors"
    arguments = tmp_path / "a.txt", "--tokenizer", checkpoints.target, "--out", out
    assert train(*arguments)["continuations"] == train(*arguments)["pairs"]
    assert train(*arguments, "--continuations", 1)["continuations"] == 6  # of a, b, c, d, e and the space
    assert BigramTables.load(out, VOCAB_SIZE).offsets.diff().max() == 1
    run = CliRunner().invoke(app, ["train", "static", *map(str, arguments)])
    assert "6 kept" not in run.stderr
    assert f"{out}: 42 tokens" in run.stderr.replace("\n", "")


@pytest.mark.parametrize(
    ("content", "name", "reason"),
    [
        (b"\xff\xfe", "a.txt", "can't be read as text"),
        (b"", "a.txt", "no two tokens"),
        (b"{", "a.jsonl", "1 is not JSON"),
        (b'[1, 2]\n{"text": "a"}', "a.jsonl", "2 has no token ids"),
        (b"[1, 264]", "a.jsonl", "the token 264 and the vocabulary has 264"),
    ],
)
def test_static_refuses_files_without_pairs(
    checkpoints: Checkpoints, tmp_path: Path, content: bytes, name: str, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        train(tmp_path / name, "--tokenizer", checkpoints.target, "--out", tmp_path / "t.safetensors")
    assert not (tmp_path / "t.safetensors").exists()


def test_static_refuses_missing_folders(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        train(tmp_path / "a", "--tokenizer", checkpoints.target, "--out", tmp_path / "b" / "t.safetensors")
    with pytest.raises(ConfigError, match="can't be read"):
        train(tmp_path / "a", "--tokenizer", checkpoints.target, "--out", tmp_path / "t.safetensors")
    with pytest.raises(ModelError):
        train(tmp_path / "a", "--tokenizer", tmp_path / "nothing", "--out", tmp_path / "t.safetensors")


def test_lines_are_texts_of_an_encoder_decoder_s_decoder(tmp_path: Path) -> None:
    """Each begins with the start token and ends with the end token, and no pair spans two lines."""
    folder = write_t5(tmp_path, make_t5())
    texts, ids, out = tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "t.safetensors"
    tokens = Tokenizer.load(tmp_path).encode("ab")
    assert tokens[-1] == END
    texts.write_text("ab\nab\n")
    ids.write_text("\n".join(map(json.dumps, ("ab", tokens, {"token_ids": tokens}))) + "\n\n")
    counted = train(texts, ids, "--tokenizer", folder, "--out", out)
    assert counted["tokens"] == 5 * (1 + len(tokens))
    assert counted["pairs"] == len(tokens)
    tables = BigramTables.load(out, VOCAB_SIZE)
    assert int(tables.row(BEGIN).argmax()) == tokens[0]
    drafting = LLM(folder, speculative_config={"method": "static", "tables": str(out), "draft_length": "fixed"})
    (made,) = drafting.generate("ab", SamplingParams(temperature=1, max_tokens=8, seed=1, ignore_eos=True))
    assert made.metrics.speculative_decoding.num_draft_tokens > 0


def test_no_continuations_are_unigrams_alone(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab ac ad ae ab" * 3)
    out = tmp_path / "t.safetensors"
    assert not train(tmp_path / "a.txt", "--tokenizer", checkpoints.target, "--out", out, "--continuations", 0)[
        "continuations"
    ]
    tables = BigramTables.load(out, VOCAB_SIZE)
    torch.testing.assert_close(tables.row(5).float(), tables.unigram)
