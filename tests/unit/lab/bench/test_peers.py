"""The comparison with other engines: reading their output, and the report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.peers import compare, hf_transformers, models, own_engine
from benchmarks.peers.base import (
    DEFAULT,
    DRAFT,
    FILE,
    LOOKUP,
    PLAIN,
    Job,
    Measurement,
    Mode,
    Pair,
    PeerError,
    Progress,
    Workload as PeerWorkload,
    content_key,
)
from benchmarks.peers.compare import Case, CaseResult, Entry, Plan, Run
from benchmarks.peers.ctranslate2_t5 import CTranslate2, Tensors
from benchmarks.peers.gguf_export import arrange, gguf_name
from benchmarks.peers.hf_transformers import Transformers
from benchmarks.peers.llama_cpp import (
    BENCH,
    COMPLETE,
    LOOK_UP,
    PROGRAMS,
    SPECULATE,
    TOKENIZE,
    LlamaCpp,
    read_bench,
    read_completion,
    read_speculation,
)
from benchmarks.peers.models import DEMO, POSITIONS, Workloads, canonical_prompt, make_pair
from benchmarks.peers.report import case_value, tables
from benchmarks.peers.t5_models import SHAPES
from safetensors.torch import save_file

from speculant.cli import Speeds
from speculant.files import read_json
from speculant.lab.inflation import write_pair
from speculant.models import open_folder, resolve_source
from speculant.text import Tokenizer

COMPLETED = """\
common_perf_print:    sampling time =      10.00 ms
common_perf_print:    samplers time =       5.00 ms /   640 tokens
common_perf_print:        load time =     150.00 ms
common_perf_print: prompt eval time =     200.00 ms /   512 tokens (    0.39 ms per token,  2560.00 tokens per second)
common_perf_print:        eval time =     490.00 ms /   127 runs   (    3.86 ms per token,   259.18 tokens per second)
"""
SPECULATED = """\
encoded  512 tokens in    0.250 seconds, speed: 2048.000 t/s
decoded  129 tokens in    0.500 seconds, speed:  258.000 t/s

n_draft   = 4
n_predict = 129
n_drafted = 120
n_accept  = 90
accept    = 75.000%
"""
BENCHED = '{"n_kv_max": 4096, "pp": 512, "tg": 64, "pl": 8, "t_pp": 1.5, "t_tg": 2.0, "speed_tg": 256.0}\n'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_source(DEMO))


def _measured(seconds: float, **fields: Any) -> Measurement:
    """Return a measurement of 10 tokens, of which the first took a second."""
    return Measurement(**{"first_s": 1.0, "decode_s": seconds, "tokens": 10, "first_tokens": 1, "passes": 5, **fields})


def test_progress_splits_time_at_every_first_token() -> None:
    progress = Progress(2)
    progress.record([1, 0])
    progress.record([3, 1])
    progress.record([3, 4])
    found = progress.end([[1, 2, 3], [4, 5, 6, 7]], 9)
    assert (found.tokens, found.first_tokens, found.passes, found.drafted) == (7, 4, 4, 9)
    assert found.accepted == 3
    assert found.first_s > 0
    assert found.decode_s > 0


def test_measurement_scales_to_a_number_of_tokens() -> None:
    measured = _measured(3.0)
    assert measured.tokens_per_s == 3.0
    assert measured.seconds(10) == 4.0
    assert measured.seconds(7) == 3.0


def test_job_survives_its_file(tmp_path: Path) -> None:
    workload = PeerWorkload([[1, 2]], ["ab"], [[3]], 5)
    job = Job(Pair("t", "d"), "int8", [Mode(PLAIN), Mode(DRAFT, 4)], workload, 2)
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job


def test_prompts_are_the_encoding_of_their_text(tokenizer: Tokenizer) -> None:
    for index, length in [(0, 24), (3, 512), (5, 1500)]:
        prompt = canonical_prompt(tokenizer, index, length)
        assert prompt is not None
        assert len(prompt) == length
        assert tokenizer.encode(tokenizer.decode(prompt)) == prompt


def test_workload_warms_up_with_other_prompts(tokenizer: Tokenizer) -> None:
    made = Workloads(tokenizer).make(3, 40, 8)
    every = [*made.prompts, *made.warm_up]
    assert len({tuple(prompt) for prompt in every}) == 6
    assert made.positions == 48


@pytest.mark.slow
def test_a_piece_of_code_without_a_prompt_is_left_out(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No end of the piece of code number 53 has exactly 512 tokens."""
    assert canonical_prompt(tokenizer, 53, 512) is None
    source = Workloads(tokenizer)
    monkeypatch.setattr(source, "_numbers", iter(range(52, 99)))
    assert source.make(2, 512, 8).prompts[1] == canonical_prompt(tokenizer, 54, 512)


def test_prompts_that_cannot_be_made_fail_before_anything_runs(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        models, "canonical_prompt", lambda tokenizer, index, length: None if length == 48 else [1] * length
    )
    peer, cases = _Fake(), [Case(24, 1, "bf16"), Case(48, 1, "bf16")]
    comparison = compare.Comparison([peer], Pair("t", "d"), tmp_path, tokenizer)
    with pytest.raises(ValueError, match="exactly 48 tokens"):
        next(comparison.run(Plan(cases, [Mode(PLAIN)], 8, 3, 1), lambda line: None))
    assert peer.jobs == []


def test_conversions_are_named_by_content_and_converter(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "README.md").write_text("a model")
    key = content_key(str(tmp_path), ["1.0"])
    (tmp_path / "README.md").write_text("the model")
    assert content_key(str(tmp_path), ["1.0"]) == key
    assert content_key(str(tmp_path), ["1.1"]) != key
    (tmp_path / "model.safetensors").write_bytes(b"WEIGHTS")
    assert content_key(str(tmp_path), ["1.0"]) != key


def test_pair_gets_room_and_keeps_its_weights(tmp_path: Path) -> None:
    pair = make_pair(DEMO, tmp_path)
    for folder, role in zip((pair.target, pair.draft), ("target", "draft"), strict=True):
        source = resolve_source(DEMO, role)
        config = read_json(Path(folder) / "config.json")
        assert config == {**read_json(source / "config.json"), "max_position_embeddings": POSITIONS}
        assert (Path(folder) / "model.safetensors").samefile(source / "model.safetensors")
    assert make_pair(DEMO, tmp_path) == pair


def test_completion_is_read_from_its_times() -> None:
    found = read_completion(COMPLETED, "text")
    assert (found.first_s, found.decode_s) == (0.2, 0.5)
    assert (found.tokens, found.first_tokens, found.passes, found.drafted) == (128, 1, 128, 0)
    assert found.texts == ["text"]


def test_speculation_is_read_from_its_counts() -> None:
    found = read_speculation(SPECULATED, "\n\n<s>prompt and more\n", "prompt")
    assert (found.first_s, found.decode_s, found.tokens) == (0.25, 0.5, 129)
    assert (found.accepted, found.passes, found.drafted) == (90, 39, 120)
    assert found.texts == [" and more\n"]


def test_bench_is_read_from_its_line() -> None:
    found = read_bench("llama_model_loader: noise\n" + BENCHED)
    assert (found.first_s, found.decode_s, found.tokens, found.passes) == (1.5, 2.0, 512, 512)
    assert found.outputs is None
    assert found.texts is None


@pytest.mark.parametrize("read", [lambda: read_completion("no times", ""), lambda: read_bench("no line")])
def test_output_without_figures_is_an_error(read: Any) -> None:
    with pytest.raises(PeerError):
        read()


def _programs(folder: Path, ids: list[int]) -> LlamaCpp:
    """Write programs that print the output of llama.cpp's programs, and record their calls."""
    printed = {COMPLETE: COMPLETED, SPECULATE: SPECULATED, LOOK_UP: SPECULATED, BENCH: BENCHED, TOKENIZE: str(ids)}
    (folder / "bin").mkdir()
    for name in PROGRAMS:
        help_text = "case $* in *--help*) echo --spec-draft-n-max --draft-min --draft-p-min; exit;; esac\n"
        text = f"#!/bin/sh\n{help_text}echo {name} $* >> {folder}/calls\ncat <<'END'\n{printed.get(name, '')}\nEND\n"
        (folder / "bin" / name).write_text(text, encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    return LlamaCpp(folder)


def test_llama_cpp_runs_a_program_for_each_mode(tmp_path: Path) -> None:
    peer = _programs(tmp_path, [1, 2])
    modes = [Mode(PLAIN), Mode(DRAFT, 4), Mode(LOOKUP, 4), Mode(DEFAULT)]
    job = Job(Pair("t.gguf", "d.gguf"), "bf16", modes, PeerWorkload([[1, 2]], ["ab"], [[3]], 128), 2)
    assert peer.missing() is None
    found = peer.run(job)
    assert {mode: each.tokens for mode, each in found.items()} == {
        "plain": 128,
        "draft 4": 129,
        "lookup 4": 129,
        "default": 129,
    }
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if not line.startswith(TOKENIZE)]
    assert [call.split()[0] for call in calls] == [COMPLETE, SPECULATE, LOOK_UP, SPECULATE]
    assert "-md d.gguf" in calls[1]
    assert "--spec-draft-n-max 4 --draft-min 0 --draft-p-min 0" in calls[1]
    assert "n-max" not in calls[3]
    assert all("-t 2 -tb 2 --temp 0" in call and "--ignore-eos" in call for call in calls)


@pytest.mark.parametrize(("signal_", "said"), [("ILL", "SIGILL.*another processor.*mno-amx-int8"), ("SEGV", "failed")])
def test_llama_cpp_is_tried_before_it_is_measured(tmp_path: Path, signal_: str, said: str) -> None:
    peer, models = _programs(tmp_path, []), Pair("t.gguf", "d.gguf")
    assert peer.prepare(models, FILE, tmp_path) == models
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.startswith(f"{COMPLETE} -m t.gguf -p def add(a, b): -n 2")
    (tmp_path / "bin" / COMPLETE).write_text(f"#!/bin/sh\nkill -{signal_} $$\n", encoding="utf-8")
    with pytest.raises(PeerError, match=said):
        peer.prepare(models, FILE, tmp_path)


def test_llama_cpp_benches_several_sequences(tmp_path: Path) -> None:
    peer = _programs(tmp_path, [])
    job = Job(Pair("t", "d"), "q4_0", [Mode(PLAIN)], PeerWorkload([[1, 2]] * 8, ["ab"] * 8, [], 64), 2)
    assert peer.run(job)["plain"].tokens == 512
    assert "-npp 2 -ntg 64 -npl 8" in (tmp_path / "calls").read_text()
    assert peer.refusal(Mode(DRAFT, 4), 8) is not None
    assert peer.refusal(Mode(PLAIN), 8) is None


def test_llama_cpp_refuses_other_tokens(tmp_path: Path) -> None:
    job = Job(Pair("t", "d"), "bf16", [Mode(PLAIN)], PeerWorkload([[1, 2]], ["ab"], [], 8), 1)
    with pytest.raises(PeerError, match="other tokens"):
        _programs(tmp_path, [1, 3]).run(job)


def test_missing_peers_name_the_searched_places(tmp_path: Path) -> None:
    assert f"{COMPLETE}, " in str(LlamaCpp(tmp_path).missing())
    assert str(tmp_path) in str(LlamaCpp(tmp_path).missing())
    assert "did not run" in str(Transformers(str(tmp_path / "python")).missing())
    absent = Transformers(sys.executable)
    absent.package = "no-such-package"
    assert absent.missing() == f"{sys.executable} has no package no-such-package"


def test_every_tensor_has_a_name_in_llama_cpp() -> None:
    names = [gguf_name(name) for name in open_folder(resolve_source(DEMO)).names()]
    assert len(set(names)) == len(names)
    assert "blk.7.attn_q.weight" in names


def test_arranged_heads_rotate_in_neighbouring_pairs() -> None:
    config = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}
    rows = torch.arange(12.0).view(12, 1)
    assert arrange("model.layers.0.self_attn.q_proj.weight", rows, config).flatten().tolist() == [
        *(0, 3, 1, 4, 2, 5),
        *(6, 9, 7, 10, 8, 11),
    ]
    assert arrange("model.layers.0.self_attn.v_proj.weight", rows, config) is rows


def _result() -> CaseResult:
    def runs(*seconds: float, text: str = "abcd") -> list[Run]:
        return [Run(_measured(each, drafted=10), [text], 20.0) for each in seconds]

    entries = {
        Entry("Speculant", "bfloat16", PLAIN): runs(9.0, 9.0, 9.0),
        Entry("Speculant", "bfloat16", "draft 4"): runs(3.0, 3.0, 3.0),
        Entry("other", "bfloat16", PLAIN): runs(18.0, 9.0, 27.0, text="abXX"),
        Entry("other", "bfloat16", DEFAULT): runs(6.0, 6.0, 6.0),
    }
    return CaseResult(Case(512, 1, "bf16"), entries, ["a note"])


def test_equal_settings_are_compared_round_by_round() -> None:
    rows = case_value(_result(), "Speculant", 10, 2)["rows"]
    equal = {(row["peer"], row["mode"]): row["equal"] for row in rows}
    assert equal["other", PLAIN]["tokens_per_s"] == {"q1": 1.5, "median": 2.0, "q3": 2.5, "low": 1.0, "high": 3.0}
    assert equal["other", PLAIN]["whole"]["median"] == 19 / 10
    assert equal["other", DEFAULT] is None
    assert equal["Speculant", PLAIN] is None


def test_best_modes_are_those_of_the_least_time() -> None:
    [best] = case_value(_result(), "Speculant", 10, 2)["best"]
    assert (best["peer"], best["mode"], best["own_mode"]) == ("other", DEFAULT, "draft 4")
    assert best["tokens_per_s"]["median"] == 2.0


def test_rows_have_acceptance_and_the_share_of_same_text() -> None:
    value = case_value(_result(), "Speculant", 10, 2)
    rows = {(row["peer"], row["mode"]): row for row in value["rows"]}
    assert rows["other", PLAIN]["acceptance"] == 0.5
    assert rows["other", PLAIN]["tokens_per_pass"] == 2.0
    assert rows["other", PLAIN]["same_text"] == 0.5
    assert rows["Speculant", "draft 4"]["same_text"] == 1.0
    assert json.loads(json.dumps(value))["notes"] == ["a note"]


def test_tables_have_a_line_for_each_entry() -> None:
    text = tables([case_value(_result(), "Speculant", 10, 2)])
    first, _, second = text.partition("\n\n")
    assert len(first.splitlines()) == 2 + 4
    assert "| other, bfloat16 | plain |" in first
    assert "unsteady: 1 to 3" in first, "rounds that differ three times have no median"
    assert "2 (1.5 to 2.5)" not in first
    assert "| other | default, bfloat16 | draft 4 |" in second
    assert len({line.count("|") for line in first.splitlines()}) == 1


class _Fake:
    """A peer in this process. broken: a format whose conversion fails; failing: one whose runs fail."""

    name, install, formats = "fake", "", {"bf16": ("whole", "broken", "failing")}

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.prepared: list[str] = []

    def missing(self) -> None:
        return None

    def version(self) -> str:
        return "1"

    def refusal(self, mode: Mode, batch: int) -> str | None:
        return "alone only" if batch > 1 and mode.kind != PLAIN else None

    def prepare(self, models: Pair, weights: str, folder: Path) -> Pair:
        self.prepared.append(weights)
        if weights == "broken":
            raise PeerError("no converter")
        return models

    def run(self, job: Job) -> dict[str, Measurement]:
        if job.format == "failing":
            raise PeerError("no memory")
        self.jobs.append(job)
        return {mode.name: _measured(1.0, outputs=[[65]] * len(job.workload.prompts)) for mode in job.modes}


@pytest.fixture
def compared(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[_Fake, list[CaseResult]]:
    """Compare the fake in two cases of two rounds."""
    monkeypatch.setattr(compare, "measure_speeds", lambda: Speeds(20.0, 10.0, None))
    peer, cases = _Fake(), [Case(24, 1, "bf16"), Case(24, 2, "bf16")]
    plan = Plan(cases, [Mode(PLAIN), Mode(DRAFT, 4)], 8, 2, 1)
    comparison = compare.Comparison([peer], Pair("t", "d"), tmp_path, tokenizer)
    return peer, list(comparison.run(plan, lambda line: None))


def test_comparison_has_the_modes_that_a_peer_has(compared: tuple[_Fake, list[CaseResult]]) -> None:
    alone, together = compared[1]
    assert [(entry.format, entry.mode, len(runs)) for entry, runs in alone.runs.items()] == [
        ("whole", "plain", 2),
        ("whole", "draft 4", 2),
    ]
    assert [entry.mode for entry in together.runs] == ["plain"]
    assert "fake whole, draft 4: alone only" in together.notes


def test_comparison_has_notes_of_failures(compared: tuple[_Fake, list[CaseResult]]) -> None:
    peer, [alone, together] = compared
    assert "fake broken: no converter" in alone.notes
    assert "fake failing failed: no memory" in together.notes
    assert peer.prepared.count("broken") == 1


def test_rounds_have_prompts_of_their_own(compared: tuple[_Fake, list[CaseResult]]) -> None:
    workloads = [job.workload for job in compared[0].jobs if len(job.workload.prompts) == 2]
    prompts = [tuple(prompt) for each in workloads for prompt in (*each.prompts, *each.warm_up)]
    assert len(set(prompts)) == len(prompts) == 8


@pytest.mark.slow  # as long as all others here
def test_peers_write_the_same_text_from_sources(tmp_path: Path) -> None:
    """Speculant and transformers, plain and with drafts, whose accepted tokens are as many as the pair's agreement."""
    target, draft = write_pair(tmp_path, 0.75, (SHAPES["tiny"], SHAPES["tiny"]), first=24)
    workload = PeerWorkload([[5, 6, 7]], ["a"], [[8, 9]], 24)
    job = Job(Pair(str(target), str(draft)), "float32", [Mode(PLAIN), Mode(DRAFT, 2)], workload, 1)
    found = {module: dict(module.measure(job)) for module in (own_engine, hf_transformers)}
    outputs = [each.outputs for modes in found.values() for each in modes.values()]
    assert outputs[0] is not None
    assert len(outputs[0][0]) == 24
    assert all(each == outputs[0] for each in outputs)
    for modes in found.values():
        assert (modes["plain"].passes, modes["plain"].drafted) == (24, 0)
        assert 8 < modes["draft 2"].passes < 18
        assert modes["draft 2"].accepted <= (modes["draft 2"].drafted or 0) <= 2 * 24


def test_ctranslate2_gets_t5_models_alone(tmp_path: Path) -> None:
    peer = CTranslate2()
    assert peer.refusal(Mode(PLAIN), 8) is None
    assert "no speculative" in str(peer.refusal(Mode(DRAFT, 4), 1))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(PeerError, match="T5"):
        peer.prepare(Pair(str(tmp_path), ""), "float32", tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_are_read_without_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = {f"{name}.weight": torch.randn(3, 5).to(dtype) for name in "ab"}
    save_file(stored, tmp_path / "model.safetensors")
    found = Tensors(tmp_path / "model.safetensors", {})["b"]
    assert torch.equal(torch.from_numpy(found), stored["b.weight"].float())
