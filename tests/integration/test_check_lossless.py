"""`speculant check-lossless`, as it is typed, with tiny random models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from speculant.cli import app
from speculant.errors import SpeculantError
from speculant.lab.cli import CheckedEngine, CheckedSampling
from speculant.verification import Rejection
from tests.faults import accept_always, report_flatter_distributions
from tests.models import Checkpoints

SMALL = ("--cases", "8", "--texts", "16", "--max-tokens", "16", "--ignore-eos", "--prompt", "abc", "--prompt", "import")
PROOF = {
    "rule", "announced_lossless", "requests", "draft", "vocabularies", "draft_nodes", "cases", "mean_accepted",
    "largest_deviation", "tolerance", "error", "passed",
}  # fmt: skip
SCORE = {
    "test", "what", "unit", "tokens", "observed", "expected", "z", "p_value", "level", "detectable_shift", "power",
    "passed",
}  # fmt: skip
COMPARISON = {
    "requests", "way", "texts", "agreeing", "tokens", "bitwise", "first_difference_gap_nats",
    "explained_by_rounding_nats", "passed",
}  # fmt: skip


def _invoke(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(app, ["check-lossless", *arguments], env=env)


def _pair(checkpoints: Checkpoints, *arguments: str) -> tuple[str, ...]:
    return ("--model", checkpoints.target, "--draft-model", checkpoints.far, *SMALL, *arguments)


def _json(*arguments: str) -> dict[str, Any]:
    result = _invoke(*arguments, "--json")
    value: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if value["lossless"] else 1)
    return value


def test_a_lossless_pair_passes_with_a_full_report(checkpoints: Checkpoints) -> None:
    value = _json(*_pair(checkpoints))
    assert value["lossless"]
    assert value["verdict"].startswith("lossless")
    assert value["lossy_rules"] == value["notes"] == []
    assert [(each["rule"], each["requests"], each["cases"]) for each in value["proven"]] == [
        ("block", ["sampled"], 8),
        ("match", ["greedy"], 2),
        ("match", ["seeded"], 2),
    ]
    assert all(set(each) == PROOF and each["largest_deviation"] <= 1e-12 for each in value["proven"])
    *scores, impossible = value["tested"]
    assert [set(each) for each in scores] == [SCORE] * 3
    assert all(each["tokens"] == 16 * 16 and 0 < each["detectable_shift"] < 1 for each in scores)
    assert (impossible["test"], impossible["observed"], impossible["passed"]) == ("impossible", 0, True)
    assert [each["requests"] for each in value["identity"]] == ["greedy"] * 3 + ["seeded"] * 3
    assert all(set(each) == COMPARISON and each["agreeing"] == each["texts"] == 2 for each in value["identity"])
    settings = value["settings"]
    assert settings["rules"] == {"sampled": "block", "greedy": "match", "seeded": "match"}
    assert settings["engine"]["model"] == checkpoints.target
    assert settings["sampling"]["max_tokens"] == 16
    assert (settings["cases"], settings["texts"], settings["prompts"]) == (8, 16, 2)


def test_text_reports_proofs_tests_and_their_power(checkpoints: Checkpoints) -> None:
    result = _invoke(*_pair(checkpoints, "--method", "draft_model", "--verification", "rejection"))
    assert result.exit_code == 0
    shown = result.stdout
    assert shown.startswith("speculation is on: draft_model, 5 tokens a step")
    assert "rejection for sampled requests, rejection for greedy requests, match for seeded requests" in shown
    assert (
        "8 random pairs of distributions, vocabularies of 2 to 4, 1 to 3 draft tokens by draft_model, around tables"
        in shown
    )
    assert "(1e-12 is rounding)" in shown
    assert "percentage points in the probability of the target's likeliest token would have been seen in 95 of" in shown
    assert "greedy, speculative, together: 2 of 2 texts agree ok" in shown
    assert "\nlossless: " in shown
    assert "\x1b[" not in shown
    assert "FAILED" not in shown


@pytest.mark.parametrize(
    ("arguments", "verifiers"),
    [
        (["--method", "ngram"], {"sampled": "match", "greedy": "match", "seeded": "match"}),
        (["--speculative-config", "method=ngram,verification=rejection"], {"sampled": "rejection"}),
    ],
)
def test_a_drafter_without_a_model(checkpoints: Checkpoints, arguments: list[str], verifiers: dict[str, str]) -> None:
    value = _json("--model", checkpoints.target, *SMALL, *arguments)
    assert value["lossless"]
    assert value["settings"]["rules"].items() >= verifiers.items()
    assert value["proven"][0]["draft"] == "ngram, around tables"
    assert value["proven"][0]["mean_accepted"] > 0


@pytest.mark.slow  # test_proofs.py and the folder exactness have trees
def test_a_tree(checkpoints: Checkpoints) -> None:
    config = json.dumps({"tree": [2, 1]})
    value = _json(*_pair(checkpoints, "--speculative-config", config))
    assert value["lossless"]
    assert value["settings"]["rules"]["sampled"] == "traversal"
    assert value["proven"][0]["draft_nodes"] == [2, 3, 4]


def test_a_rule_that_always_accepts_fails_each_part_using_it(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept_always(monkeypatch)
    value = _json(*_pair(checkpoints, "--verification", "rejection"))
    assert not value["lossless"]
    assert value["verdict"] == "NOT lossless: the proof and the tests on this pair and the identity of texts failed"
    passed = {(each["rule"], *each["requests"]): each["passed"] for each in value["proven"]}
    assert passed == {("rejection", "sampled"): False, ("rejection", "greedy"): False, ("match", "seeded"): True}
    assert {each["test"] for each in value["tested"] if not each["passed"]} >= {"q > p", "log p"}
    failed = {(each["requests"], each["way"]) for each in value["identity"] if not each["passed"]}
    assert failed == {("greedy", "speculative, alone"), ("greedy", "speculative, together")}


@pytest.mark.slow
def test_a_draft_distribution_that_was_not_drawn_from_fails(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_flatter_distributions(monkeypatch)
    result = _invoke(*_pair(checkpoints, "--texts", "150"))
    assert result.exit_code == 1
    assert "block, for sampled requests: FAILED" in result.stdout
    assert "match, for seeded requests: ok" in result.stdout
    assert "NOT lossless: the proof and the tests on this pair failed" in result.stdout


def test_a_rule_that_is_lossy_by_design_is_called_so(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_always(monkeypatch)
    monkeypatch.setattr(Rejection, "lossless", False)
    value = _json(*_pair(checkpoints, "--verification", "rejection"))
    assert not value["lossless"]
    assert value["lossy_rules"] == ["rejection"]
    assert value["verdict"] == "not lossless by design: rejection"
    assert [each["announced_lossless"] for each in value["proven"]] == [False, False, True]
    assert not value["tested"][0]["passed"]
    shown = _invoke(*_pair(checkpoints, "--verification", "rejection"))
    assert shown.exit_code == 1
    assert "rejection (announces that it is not lossless), for sampled requests: FAILED" in shown.stdout


@pytest.mark.slow  # exactness/test_lenient.py has the rule, and test_proofs.py its options
def test_lenient_is_measured_with_its_own_lenience(checkpoints: Checkpoints) -> None:
    deviations = []
    for lenience in ("0.9", "0.2"):
        value = _json(*_pair(checkpoints, "--speculative-config", f"verification=lenient,lenience={lenience}"))
        assert value["lossy_rules"] == ["lenient"]
        assert [each["announced_lossless"] for each in value["proven"]] == [False, False, True]
        deviations.append(value["proven"][0]["largest_deviation"])
    assert 1e-3 < deviations[0] < deviations[1]


@pytest.mark.slow
def test_a_rule_that_means_to_be_lossy_never_passes(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where no deviation is visible."""
    monkeypatch.setattr(Rejection, "lossless", False)
    value = _json(*_pair(checkpoints, "--verification", "rejection"))
    assert all(each["passed"] for part in ("proven", "tested", "identity") for each in value[part])
    assert not value["lossless"]


def test_settings_without_a_choice_are_reported(checkpoints: Checkpoints) -> None:
    result = _invoke(*_pair(checkpoints, "--top-k", "1"))
    assert result.exit_code == 0
    assert "these settings leave no choice, so there was nothing to test" in result.stdout


@pytest.mark.slow
def test_json_stays_json_with_bans(checkpoints: Checkpoints) -> None:
    value = _json(*_pair(checkpoints, "--logit-bias", '{"70": "-inf", "71": 1}'))
    assert value["settings"]["sampling"]["logit_bias"] == {"70": "-inf", "71": 1.0}
    assert value["lossless"]


# --- what is asked


def _arguments(given: dict[str, Any], method: str | None = None, verification: str | None = None) -> dict[str, Any]:
    values = {CheckedEngine.renamed.get(name, name): None for name in CheckedEngine.names()}
    return CheckedEngine({**values, **given}).arguments(method, verification)


def test_the_embedded_pair_is_checked_unless_another_is_named() -> None:
    nothing = {"speculative_config": {"draft_length": "fixed"}}
    assert _arguments({}) == {"model": "demo", "draft_model": "demo", **nothing}
    assert _arguments({"draft_model": "x"}) == {"model": "demo", "draft_model": "x", **nothing}
    assert _arguments({"model": "x"}) == {"model": "x", **nothing}
    assert _arguments({}, "ngram")["draft_model"] is None
    assert _arguments({}, verification="match")["speculative_config"] == {
        "verification": "match",
        "draft_length": "fixed",
    }
    assert _arguments({}, verification="match")["draft_model"] == "demo"
    config = {"max_order": 3, "draft_length": "adaptive"}
    both = _arguments({"model": "x", "speculative_config": "max_order=3,draft_length=adaptive"}, "ngram", "match")
    assert both["speculative_config"] == {**config, "method": "ngram", "verification": "match"}


def test_only_flags_for_distributions_and_ends_are_offered() -> None:
    assert {"temperature", "stop", "max_tokens"} <= set(CheckedSampling.names())
    assert not {"n", "seed", "logprobs", "speculation"} & set(CheckedSampling.names())


@pytest.mark.parametrize(
    ("arguments", "problem", "fix"),
    [
        (["--temperature", "0"], "temperature=0", "leave it out"),
        (["--cases", "0"], "cases=0", "--cases 50"),
        (["--texts", "-1"], "texts=-1", "--texts 50"),
        (["--verification", "rejektion"], "'rejektion' is unknown", "did you mean 'rejection'"),
        (["--no-use-speculative-decoding"], "speculation is off", "--no-use-speculative-decoding"),
        (["--method", "ngram"], "uses no model", "leave out one"),
        (["--method", "draft_model", "--speculative-config", "method=ngram"], "given twice", "keep one"),
        (["--top-p", "3"], "top_p=3.0", "range"),
    ],
)
def test_a_mistake_is_explained(checkpoints: Checkpoints, arguments: list[str], problem: str, fix: str) -> None:
    error = _invoke("--model", checkpoints.target, "--draft-model", checkpoints.near, *arguments).exception
    assert isinstance(error, SpeculantError)
    assert problem in error.problem
    assert fix in error.fix


@pytest.mark.slow
def test_a_model_without_a_draft_is_checked(checkpoints: Checkpoints) -> None:
    result = _invoke("--model", checkpoints.target, *SMALL, "--json")
    assert "fallback (no draft model is named)" in json.loads(result.stdout)["settings"]["speculation"]


def test_progress_keeps_off_the_result(checkpoints: Checkpoints) -> None:
    result = _invoke(*_pair(checkpoints, "--json"), FORCE_COLOR="1", TERM="xterm-256color")
    assert json.loads(result.stdout)["lossless"]
    assert "Enumerating block on tables" in result.stderr


@pytest.mark.slow  # test_main.py has the help of every command, and imports
def test_help_has_examples() -> None:
    shown = _invoke("--help", COLUMNS="200").stdout
    assert "speculant check-lossless --model ./llama" in shown
    assert "--verification" in shown
