"""The page on adding a head is true: its code, dropped in from another package, drafts and changes no text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from speculant import LLM, SamplingParams
from speculant.errors import PairError
from tests.heads import write_head
from tests.models import HIDDEN_SIZE, Checkpoints

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "adding-a-head.md").read_text(encoding="utf-8")
NAME = "linear_heads"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the page's code as another package does it."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "their_head.py").write_text(code, encoding="utf-8")
    info = tmp_path / "their_head-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-head\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[speculant.drafting]\n{NAME} = their_head\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def write(folder: Path, size: int) -> str:
    return write_head(folder, {"speculant_head": NAME}, {f"{i}.weight": torch.eye(size) for i in range(2)})


def test_its_drafts_change_no_text(installed: None, checkpoints: Checkpoints, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    prompts = ["def read(path):", "import os", "hello world " * 4]
    plain = LLM(checkpoints.target, dtype="float64").generate(prompts, params)
    config = {"method": NAME, "model": write(tmp_path / "head", HIDDEN_SIZE), "num_speculative_tokens": 2}
    results = LLM(checkpoints.target, dtype="float64", speculative_config=config).generate(prompts, params)
    assert [each.outputs[0].token_ids for each in results] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.metrics.speculative_decoding.num_draft_tokens for each in results) > 0


def test_a_head_of_another_target_is_refused(installed: None, checkpoints: Checkpoints, tmp_path: Path) -> None:
    config = {"method": NAME, "model": write(tmp_path / "head", 2 * HIDDEN_SIZE)}
    with pytest.raises(PairError, match=r"0.weight is \[64, 64\] and must be \[32, 32\]"):
        LLM(checkpoints.target, speculative_config=config)


def test_what_the_page_names_exists() -> None:
    for path in re.findall(r"`((?:tests|lab|drafting|models)/[\w/]+(?:\.py|/))`", PAGE):
        assert (ROOT / path).exists() or (ROOT / "src" / "speculant" / path).exists(), path
