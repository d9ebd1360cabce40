"""The methods whose length `speculant check-pair` can recommend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from speculant import plugins
from speculant.config import EngineConfig
from speculant.drafting import LOOKUPS, PREDICTION, Method
from speculant.errors import ConfigError
from speculant.lab.bench import require_lengths, stored_parameters
from tests.gguf_models import convert
from tests.models import write_checkpoint

DRAFTING = "speculant.drafting"
FACTS: dict[str, Method] = {name: plugins.load(DRAFTING, name).METHOD for name in plugins.names(DRAFTING)}


def config_of(method: str) -> EngineConfig:
    return EngineConfig.from_arguments(model="demo", speculative_config={"method": method})


@pytest.mark.parametrize("method", [name for name, facts in FACTS.items() if facts.varies])
def test_drafts_of_varying_length_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=f"drafts of '{method}' are as long as the text that it finds") as caught:
        require_lengths(config_of(method))
    assert f"speculant bench compare demo --method {method}" in str(caught.value.fix)


@pytest.mark.parametrize("method", ["early_exit", "eagle", "draft_model"])
def test_methods_that_always_draft_are_measured(method: str) -> None:
    require_lengths(config_of(method))


def test_lookups_announce_that_their_drafts_vary() -> None:
    assert {"ngram", "fallback", PREDICTION, *LOOKUPS} <= {name for name, facts in FACTS.items() if facts.varies}


def test_parameters_of_a_gguf_file_are_counted(tmp_path: Path) -> None:
    """The factors of rotary positions are no weights."""
    folder = write_checkpoint(tmp_path / "model")
    file = convert(folder, tmp_path / "model.gguf", extra={"rope_freqs.weight": np.ones(4, np.float32)})
    assert stored_parameters(str(file), "draft_model") == stored_parameters(folder, "draft_model") > 10_000
