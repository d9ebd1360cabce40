"""The log of failed steps and requests: enough to find the cause, and no warning."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import speculant.engine.step as step_module
from speculant import LLM, SamplingParams
from tests.models import Checkpoints

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def llm(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Make an engine whose pass fails whenever a prompt of one token is in it."""
    forward = step_module.forward_target

    def failing(model: Any, cache: Any, scheduled: Any, trees: Any, layers: Any) -> Any:
        if any(len(item.request.prompt) == 1 for item in scheduled):
            raise ArithmeticError("no such prompt")
        return forward(model, cache, scheduled, trees, layers)

    monkeypatch.setattr(step_module, "forward_target", failing)
    return LLM(checkpoints.target, dtype="float64")


def test_failed_step_is_logged_with_its_cause(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "speculant.engine")
    good, bad = llm.generate([[50, 51], [52]], PARAMS)
    assert (good.outputs[0].finish_reason, bad.outputs[0].finish_reason) == ("length", "error")
    messages = {record.name: record.getMessage() for record in reversed(caplog.records)}
    assert messages["speculant.engine.step"].startswith("a step of 2 sequences failed")
    assert messages["speculant.engine.commit"] == "request request-1 failed: ArithmeticError('no such prompt')"


def test_a_failed_step_logs_no_warning(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The caller gets the error; Python shows warnings wherever logging is not set up."""
    llm.generate([[50, 51], [52]], PARAMS)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
