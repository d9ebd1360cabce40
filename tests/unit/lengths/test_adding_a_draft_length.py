"""The page on draft-length policies is true: its code follows accepted tokens and changes no text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from speculant import LLM, SamplingParams, lengths, plugins
from speculant.errors import ConfigError
from speculant.lengths import DraftLength, DraftLengthContext, DraftOutcome
from speculant.metrics import StepTiming
from speculant.types import DraftRules, Request
from tests.models import Checkpoints
from tests.unit.scheduling.driver import Driver, slots

PAGE = (Path(__file__).parents[3] / "docs" / "adding-a-draft-length.md").read_text(encoding="utf-8")
NOW = StepTiming(0.0, 0.1, 0.3)
PARAMS = [SamplingParams(temperature=0, max_tokens=32), SamplingParams(temperature=0.9, seed=2, max_tokens=32)]


@pytest.fixture
def policy_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Save the page's code where the package looks for policies; return the policy's name."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (name,) = re.findall(r"Saved as `(\w+)\.py`", PAGE)
    (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(lengths, "__path__", [*lengths.__path__, str(tmp_path)])
    return str(name)


def build(name: str, **options: int) -> DraftLength:
    kind = "speculant.lengths"
    policy: DraftLength = plugins.load(kind, name).build(DraftLengthContext(4, options))
    return policy


def outcome(request: Request, accepted: int, drafted: int) -> DraftOutcome:
    """Return the outcome of a chain of which a number of tokens were accepted, and the next one tested."""
    tested = min(accepted + 1, drafted)
    ones = [[1] * count + [0] * (drafted - count) for count in (tested, accepted)]
    return DraftOutcome(request, [1] * drafted, *ones)


def test_length_page_policy_follows_accepted_tokens(policy_name: str) -> None:
    driver = Driver(slots(4))
    first, _ = driver.add(3), driver.add(3)
    schedule, policy = driver.step(), build(policy_name, shortest=1)
    chosen = [policy.choose(schedule)]
    for accepted, drafted in [(0, 4), (0, 2), (0, 1), (1, 1), (1, 2), (2, 2), (3, 3), (4, 4)]:
        policy.observe([outcome(first, accepted, drafted)], NOW)
        chosen.append(policy.choose(schedule))
    assert [lengths[0] for lengths in chosen] == [4, 2, 1, 1, 2, 2, 3, 4, 4]
    assert {lengths[1] for lengths in chosen} == {4}


def test_length_page_policy_respects_a_request_s_own_length(policy_name: str) -> None:
    driver = Driver(slots(4))
    request = driver.add(3)
    schedule, policy = driver.step(), build(policy_name, shortest=2)
    for asked in (7, 1, 0):
        request.drafts = DraftRules(num_tokens=asked)
        assert policy.choose(schedule) == [asked]


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"shortest": 2}])
def test_length_page_policy_changes_no_text(
    policy_name: str, options: dict[str, int], checkpoints: Checkpoints
) -> None:
    config = {"draft_length": {"policy": policy_name, **options}, "num_speculative_tokens": 6}
    plain = LLM(checkpoints.target, dtype="float64")
    llm = LLM(checkpoints.target, checkpoints.near, dtype="float64", speculative_config=config)
    expected, found = (each.generate(["import os", "def f(x):"], PARAMS) for each in (plain, llm))
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    metrics = [each.metrics.speculative_decoding for each in found]
    assert sum(each.num_draft_tokens for each in metrics) > 0


def test_length_page_policy_checks_its_options(policy_name: str, checkpoints: Checkpoints) -> None:
    config = {"draft_length": {"policy": policy_name, "shortst": 2}}
    with pytest.raises(ConfigError, match="did you mean 'shortest'"):
        LLM(checkpoints.target, checkpoints.near, speculative_config=config)


def test_length_page_names_existing_files() -> None:
    calls = re.findall(r"^\| `(\w+)[`(]", PAGE, flags=re.MULTILINE)
    assert set(calls) == {"build", "choose", "observe", *DraftLength.__annotations__}
    for path in re.findall(r"`((?:tests|src)/[\w/]+\.py)`", PAGE):
        assert (Path(__file__).parents[3] / path).exists(), path
