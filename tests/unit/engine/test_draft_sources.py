"""The measurements that choose the type of a draft's weights, with encoder-decoder models."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from speculant.engine import (
    PROMPT,
    DraftSample,
    Precision,
    choose_precision,
    drawn,
    pass_seconds,
    precision,
    probs_along,
)
from speculant.lengths import measuring
from speculant.models import load_model
from tests.encoder_decoders import make_t5, write_t5
from tests.models import VOCAB_SIZE, write_checkpoint


def test_drafts_of_models_with_encoders_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read one source, so that the target as its own draft has an acceptance of 1. Others draw without one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "BUDGET_S", 0.02)
    folder, plain = write_t5(tmp_path / "t5", make_t5()), write_checkpoint(tmp_path / "plain")
    target = load_model(folder, "float32", kernels="auto")
    found = list[Precision]()
    monkeypatch.setattr(precision, "fastest", lambda measured, pass_s: found.extend(measured))
    for draft in (folder, plain):
        load = partial(load_model, draft, "float32", "cpu", role="draft", kernels="auto")
        choose_precision(target.model, lambda each, load=load: load(quantization=each), [draft])
    if not target.quantizations:
        pytest.skip("the native kernels are not built")
    assert found[0].acceptance == pytest.approx(1, abs=1e-6)
    assert 0.8 < min(each.acceptance for each in found[:3]) < 1, "rounding changes little"
    assert max(each.acceptance for each in found[3:]) < 0.8
    assert all(each.token_s > 0 for each in found)


def test_measured_texts_read_a_source(tmp_path: Path) -> None:
    checkpoint = load_model(write_t5(tmp_path / "t5", make_t5()), "float64")
    tokens = drawn(checkpoint, VOCAB_SIZE, 12)
    probs = probs_along(checkpoint.model, tokens, VOCAB_SIZE)
    assert len(tokens) == PROMPT + 12
    assert float(probs[PROMPT - 1 : -1].gather(1, torch.tensor(tokens[PROMPT:])[:, None]).min()) > 0
    assert torch.equal(DraftSample.of(checkpoint, tokens).probs, probs)
    assert pass_seconds(checkpoint.model, [])(3) > 0
